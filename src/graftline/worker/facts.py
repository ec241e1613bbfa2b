"""A worker's facts as messages."""

from collections.abc import Sequence
from dataclasses import asdict

from graftline.engine.models.card import ModelCardData
from graftline.engine.worker_engine import WorkerFacts
from graftline.proto.v1 import common_pb2
from graftline.proto.v1.prefill_pb2 import PairRequest
from graftline.proto.validation import ModelLimits


def card_message(card: ModelCardData, *, with_text: bool) -> common_pb2.ModelCard:
    """The model card; without text it carries only what identifies it."""
    return common_pb2.ModelCard(
        model_id=card.model_id,
        vocab_size=card.vocab_size,
        context_length=card.context_length,
        eos_token_ids=card.eos_token_ids,
        bos_token_id=card.bos_token_id,
        tokenizer_json=card.tokenizer_json if with_text else b"",
        chat_template=card.chat_template if with_text else "",
        special_tokens=card.special_tokens,
        card_hash=card.card_hash,
        sampling_defaults=common_pb2.SamplingDefaults(**asdict(card.sampling)),
    )


def fingerprint_message(facts: WorkerFacts) -> common_pb2.Fingerprint:
    """Everything that must agree between a prefill and a decode."""
    return common_pb2.Fingerprint(fields=facts.fingerprint)


def model_limits(facts: WorkerFacts) -> ModelLimits:
    """What requests are checked against."""
    return ModelLimits(vocab_size=facts.card.vocab_size, context_length=facts.context_len)


def stage_layouts(layouts: Sequence[bytes]) -> list[common_pb2.StageLayout]:
    """What the stages' transfer ports said, as messages."""
    return [common_pb2.StageLayout.FromString(layout) for layout in layouts]


def encode_peer(stages: Sequence[common_pb2.StageLayout]) -> bytes:
    """A peer's layouts on their way through the engine to our transfer ports."""
    return PairRequest(stages=stages).SerializeToString()


def decode_peer(layout: bytes) -> list[common_pb2.StageLayout]:
    """The opposite of `encode_peer`."""
    return list(PairRequest.FromString(layout).stages)
