"""Requests of SGLang's scheduler protocol as requests of our own. The router checks values later; here, what the
protocol can say and we cannot do is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from graftline.errors import InvalidRequestError
from graftline.proto.v1.router_pb2 import GenerateRequest, TokenPrompt

UNSUPPORTED = "this server does not support it"
# Fields of the request that must be absent, and what counts as absent beside the message's own default.
_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "token_ids_logprob": lambda value: not value,
    "return_hidden_states": lambda value: not value,
    "custom_logit_processor": lambda value: not value,
    "input_embeds": lambda value: not value,
    "lora_id": lambda value: not value,
}
_NEUTRAL_PENALTIES: Mapping[str, frozenset[float]] = {
    "frequency_penalty": frozenset({0.0}),
    "presence_penalty": frozenset({0.0}),
    # proto3 says 0 for what was never set.
    "repetition_penalty": frozenset({0.0, 1.0}),
}
_MULTIMODAL = ("image_urls", "video_urls", "audio_urls", "image_data", "video_data", "audio_data")


def own_request(asked: Any) -> GenerateRequest:
    """Translates a `sglang.grpc.scheduler.GenerateRequest`.

    Raises:
        InvalidRequestError: naming the field of theirs that cannot be done.
    """
    _refuse(asked)
    sampling = asked.sampling_params
    request = GenerateRequest(
        request_id=asked.request_id,
        tokens=TokenPrompt(token_ids=asked.tokenized.input_ids),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        min_tokens=sampling.min_new_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        n=sampling.n or 1,
        logit_bias=_logit_bias(sampling.logit_bias),
    )
    if sampling.HasField("max_new_tokens"):
        request.max_tokens = sampling.max_new_tokens
    if asked.return_logprob:
        request.logprobs = asked.top_logprobs_num
    return request


def _refuse(asked: Any) -> None:
    for name, is_absent in _REFUSED.items():
        if not is_absent(getattr(asked, name)):
            raise InvalidRequestError(name, UNSUPPORTED)
    if asked.HasField("mm_inputs") and (
        asked.mm_inputs.HasField("pixel_values") or any(getattr(asked.mm_inputs, name) for name in _MULTIMODAL)
    ):
        raise InvalidRequestError("mm_inputs", UNSUPPORTED)
    if asked.HasField("disaggregated_params") and asked.disaggregated_params.bootstrap_host:
        raise InvalidRequestError(
            "disaggregated_params", "this worker is a regular one: its own prefills and decodes need no bootstrap"
        )
    sampling = asked.sampling_params
    for name, neutral in _NEUTRAL_PENALTIES.items():
        value = getattr(sampling, name)
        if value not in neutral:
            raise InvalidRequestError(f"sampling_params.{name}", f"{value}: {UNSUPPORTED}")
    constraint = sampling.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequestError(f"sampling_params.{constraint}", UNSUPPORTED)
    if asked.return_logprob and 0 <= asked.logprob_start_len < len(asked.tokenized.input_ids):
        raise InvalidRequestError("logprob_start_len", f"{asked.logprob_start_len}: no logprobs of the prompt")


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and int(key) < 1 << 32):
            raise InvalidRequestError("sampling_params.logit_bias", f"{key[:50]!r} is no token id")
    return {int(key): value for key, value in biases.items()}
