"""Messages of `graftline.v1` to the nouns of the engine and back. Pure functions; values were validated before."""

from graftline.engine import request as nouns
from graftline.engine.service_api import HandoffCounts, SpeculationCounts
from graftline.proto.v1 import common_pb2
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.prefill_pb2 import PrefillStart

_FINISH_REASONS = {
    nouns.FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    nouns.FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_TREE_ORIGINS = {
    nouns.TreeOrigin.NONE: common_pb2.TREE_ORIGIN_NONE,
    nouns.TreeOrigin.REAL: common_pb2.TREE_ORIGIN_REAL,
    nouns.TreeOrigin.ROOT_ONLY: common_pb2.TREE_ORIGIN_ROOT_ONLY,
}
_TREE_ORIGIN_NOUNS = {message: noun for noun, message in _TREE_ORIGINS.items()}


# --- requests ----------------------------------------------------------------------------------------------------


def request_from(message: DecodeServiceGenerateRequest | PrefillStart, eos_token_ids: frozenset[int]) -> nouns.Request:
    """The request that a message of either service describes; `eos_token_ids` are the served model's."""
    return nouns.Request(
        key=nouns.RequestKey(nouns.RequestId(message.request_id), message.attempt),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from(message.sampling),
        stopping=stopping_from(message.stopping, eos_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def start_message(
    request: nouns.Request,
    asked: DecodeServiceGenerateRequest,
    *,
    decode_incarnation: str,
    prefill_incarnation: str,
    real_tree: bool,
) -> PrefillStart:
    """The first message of a handoff of `request`, which is `asked` plus what was emitted since."""
    return PrefillStart(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        decode_incarnation=decode_incarnation,
        prefill_incarnation=prefill_incarnation,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=asked.sampling,
        stopping=asked.stopping,
        logprobs=request.logprobs,
        real_tree=real_tree,
    )


def sampling_from(message: common_pb2.SamplingParams) -> nouns.Sampling:
    """How a token is drawn."""
    return nouns.Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
    )


def stopping_from(message: common_pb2.StoppingParams, eos_token_ids: frozenset[int]) -> nouns.Stopping:
    """When the request ends."""
    return nouns.Stopping(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        eos_token_ids=frozenset() if message.ignore_eos else eos_token_ids,
    )


# --- tokens and trees --------------------------------------------------------------------------------------------


def logprob_message(logprob: nouns.TokenLogprob) -> common_pb2.TokenLogprob:
    """A logprob and the best tokens beside it."""
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return common_pb2.TokenLogprob(logprob=logprob.logprob, top=top)


def token_from(token_id: int, logprob: common_pb2.TokenLogprob | None) -> nouns.Token:
    """An emitted token."""
    if logprob is None:
        return nouns.Token(token_id)
    top = tuple((best.token_id, best.logprob) for best in logprob.top)
    return nouns.Token(token_id, nouns.TokenLogprob(logprob.logprob, top))


def tree_message(tree: nouns.DraftTree) -> common_pb2.DraftTree:
    """A draft tree on its way to a decode."""
    return common_pb2.DraftTree(tokens=tree.tokens, parents=tree.parents, num_nodes=tree.num_nodes)


def tree_from(message: common_pb2.DraftTree) -> nouns.DraftTree:
    """A draft tree that came from a prefill.

    Raises:
        ValueError: it is none.
    """
    if message.num_nodes != len(message.tokens):
        raise ValueError(f"a tree of {message.num_nodes} nodes with {len(message.tokens)} tokens")
    return nouns.DraftTree(tuple(message.tokens), tuple(message.parents))


# --- figures -----------------------------------------------------------------------------------------------------


def finish_reason_message(reason: nouns.FinishReason) -> common_pb2.FinishReason.ValueType:
    """Why a request ended well."""
    return _FINISH_REASONS[reason]


def tree_origin_message(origin: nouns.TreeOrigin) -> common_pb2.TreeOrigin.ValueType:
    """Where the first tree came from."""
    return _TREE_ORIGINS[origin]


def tree_origin_from(message: common_pb2.TreeOrigin.ValueType) -> nouns.TreeOrigin:
    """Where the first tree came from; NONE when the peer did not say."""
    return _TREE_ORIGIN_NOUNS.get(message, nouns.TreeOrigin.NONE)


def handoff_message(counts: HandoffCounts) -> common_pb2.HandoffStats:
    """What moved and how long it took."""
    return common_pb2.HandoffStats(
        bytes=counts.num_bytes,
        write_s=counts.write_s,
        queue_s=counts.queue_s,
        prefill_s=counts.prefill_s,
        chunks=counts.chunks,
    )


def handoff_from(message: common_pb2.HandoffStats) -> HandoffCounts:
    """What moved and how long it took."""
    return HandoffCounts(message.bytes, message.write_s, message.queue_s, message.prefill_s, message.chunks)


def speculation_message(counts: SpeculationCounts, origin: nouns.TreeOrigin) -> common_pb2.SpeculationStats:
    """What speculation did for one request."""
    return common_pb2.SpeculationStats(
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        first_round_drafted=counts.first_round_drafted,
        first_round_accepted=counts.first_round_accepted,
        tree_origin=tree_origin_message(origin),
    )
