"""The one set of rules for what a request may contain, used by the router at the edge and by workers again.

Pure functions. Each raises InvalidRequestError naming the field as the caller knows it, and the value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftline.errors import InvalidRequestError, PromptTooLongError
from graftline.proto.address import parse_peer
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.prefill_pb2 import PrefillStart

MAX_TEMPERATURE = 100.0
# Below it a temperature is greedy for every distribution that float32 logits can express; the router turns it
# into 0, so that workers never divide by a denormal.
MIN_TEMPERATURE = 2.0**-13
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 64
# Of a chat. Each costs the router work, and an empty one takes two bytes of a message.
MAX_MESSAGES = 16_384
MAX_MAX_TOKENS = 1 << 20
MAX_REQUEST_ID_CHARS = 256
MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows.

    Attributes:
        vocab_size: token ids lie in [0, vocab_size).
        context_length: longest prompt plus output of one request, in tokens; the smaller of the model's own
            and of what the pools can hold.
    """

    vocab_size: int
    context_length: int


# --- single values -------------------------------------------------------------------------------------------


def check_temperature(value: float, *, field: str = "temperature") -> None:
    """0, or in [MIN_TEMPERATURE, MAX_TEMPERATURE]."""
    if not (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):
        raise InvalidRequestError(field, f"{value} is not in [0, {MAX_TEMPERATURE:g}]")


def check_top_k(value: int, *, field: str = "top_k") -> None:
    """0 is no limit."""
    if value < 0:
        raise InvalidRequestError(field, f"{value} is negative")


def check_top_p(value: float, *, field: str = "top_p") -> None:
    """In (0, 1]."""
    if not 0 < value <= 1:
        raise InvalidRequestError(field, f"{value} is not in (0, 1]")


def check_min_p(value: float, *, field: str = "min_p") -> None:
    """In [0, 1]."""
    if not 0 <= value <= 1:
        raise InvalidRequestError(field, f"{value} is not in [0, 1]")


def check_seed(value: int, *, field: str = "seed") -> None:
    """An unsigned 64-bit number."""
    if not 0 <= value <= MAX_SEED:
        raise InvalidRequestError(field, f"{value} is not in [0, 2**64)")


def check_logit_bias(bias: Mapping[int, float], vocab_size: int, *, field: str = "logit_bias") -> None:
    """Token ids of the vocabulary, finite values in [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS], a bounded number of them."""
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(field, f"{len(bias)} entries are more than {MAX_LOGIT_BIAS_ENTRIES}")
    for token_id, value in bias.items():
        _check_token_id(token_id, vocab_size, field)
        if not math.isfinite(value) or abs(value) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                field, f"{value} for token {token_id} is not in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
            )


def check_max_tokens(value: int, *, field: str = "max_tokens") -> None:
    """At least 1; more than MAX_MAX_TOKENS is a mistake rather than a wish."""
    if not 1 <= value <= MAX_MAX_TOKENS:
        raise InvalidRequestError(field, f"{value} is not in [1, {MAX_MAX_TOKENS}]")


def check_min_tokens(value: int, max_tokens: int, *, field: str = "min_tokens") -> None:
    """In [0, max_tokens]."""
    if not 0 <= value <= max_tokens:
        raise InvalidRequestError(field, f"{value} is not in [0, max_tokens = {max_tokens}]")


def check_stop_token_ids(ids: Sequence[int], vocab_size: int, *, field: str = "stop_token_ids") -> None:
    """Token ids of the vocabulary, a bounded number of them."""
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(field, f"{len(ids)} ids are more than {MAX_STOP_TOKEN_IDS}")
    for token_id in ids:
        _check_token_id(token_id, vocab_size, field)


def check_stop_strings(stop: Sequence[str], *, field: str = "stop") -> None:
    """Non-empty, of bounded length, a bounded number of them."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(field, f"{len(stop)} stop strings are more than {MAX_STOP_STRINGS}")
    for index, text in enumerate(stop):
        if not text:
            raise InvalidRequestError(f"{field}[{index}]", "the empty string ends everything before it begins")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"{field}[{index}]", f"{len(text)} characters are more than {MAX_STOP_STRING_CHARS}"
            )


def check_logprobs(value: int | None, *, field: str = "logprobs") -> None:
    """None, or in [0, MAX_LOGPROBS]."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(field, f"{value} is not in [0, {MAX_LOGPROBS}]")


def check_num_choices(value: int, *, field: str = "n") -> None:
    """In [1, MAX_CHOICES]."""
    if not 1 <= value <= MAX_CHOICES:
        raise InvalidRequestError(field, f"{value} is not in [1, {MAX_CHOICES}]")


def check_num_messages(value: int, *, field: str = "messages") -> None:
    """At most MAX_MESSAGES; whether a chat needs any is its template's affair."""
    if value > MAX_MESSAGES:
        raise InvalidRequestError(field, f"{value} messages are more than {MAX_MESSAGES}")


def check_token_ids(ids: Sequence[int], vocab_size: int, *, field: str = "token_ids") -> None:
    """At least one id, every id of the vocabulary."""
    if not ids:
        raise InvalidRequestError(field, "the prompt has no tokens")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"{field}[{list(ids).index(bad)}]", f"token id {bad} is not in [0, vocab_size = {vocab_size})"
        )


def check_prompt_fits(num_prompt_tokens: int, context_length: int, *, field: str = "prompt") -> None:
    """Room for the prompt and at least one output token."""
    if num_prompt_tokens >= context_length:
        raise PromptTooLongError(
            field, f"{num_prompt_tokens} tokens leave no room for output in a context of {context_length} tokens"
        )


def check_request_id(value: str, *, field: str = "request_id") -> None:
    """Of bounded length and printable: it is logged."""
    if len(value) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(field, f"{len(value)} characters are more than {MAX_REQUEST_ID_CHARS}")
    if not value.isprintable():
        raise InvalidRequestError(field, f"{value!r} has unprintable characters")


# --- messages to workers -------------------------------------------------------------------------------------


def check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    """Every value of a worker's sampling parameters."""
    check_temperature(sampling.temperature)
    check_top_k(sampling.top_k)
    check_top_p(sampling.top_p)
    check_min_p(sampling.min_p)
    check_logit_bias(sampling.logit_bias, limits.vocab_size)


def check_stopping(stopping: StoppingParams, limits: ModelLimits) -> None:
    """Every value of a worker's stopping parameters."""
    check_max_tokens(stopping.max_tokens)
    check_min_tokens(stopping.min_tokens, stopping.max_tokens)
    check_stop_token_ids(stopping.stop_token_ids, limits.vocab_size)


def check_output_fits(stopping: StoppingParams, num_prompt_tokens: int, limits: ModelLimits) -> None:
    """The whole output must fit the context of a decode."""
    check_prompt_fits(num_prompt_tokens, limits.context_length)
    if num_prompt_tokens + stopping.max_tokens > limits.context_length:
        raise InvalidRequestError(
            "max_tokens",
            f"{stopping.max_tokens} after a prompt of {num_prompt_tokens} tokens exceed the context of "
            f"{limits.context_length} tokens",
        )


def check_decode_request(request: DecodeServiceGenerateRequest, limits: ModelLimits) -> None:
    """What a decode service is asked to do."""
    parse_peer(request.prefill_address, field="prefill_address")
    _check_attempt(request, limits)
    check_output_fits(request.stopping, request.num_prompt_tokens, limits)


def check_prefill_start(start: PrefillStart, limits: ModelLimits) -> None:
    """What a prefill service is asked to do. Its pool holds tokens up to the next one, whatever decodes hold later."""
    for field, value in (
        ("decode_incarnation", start.decode_incarnation),
        ("prefill_incarnation", start.prefill_incarnation),
    ):
        if not value:
            raise InvalidRequestError(field, "is empty")
    _check_attempt(start, limits)
    check_prompt_fits(len(start.token_ids), limits.context_length)


def _check_attempt(request: DecodeServiceGenerateRequest | PrefillStart, limits: ModelLimits) -> None:
    if not request.request_id:
        raise InvalidRequestError("request_id", "is empty")
    check_request_id(request.request_id)
    if request.attempt < 1:
        raise InvalidRequestError("attempt", f"{request.attempt} is not at least 1")
    check_token_ids(request.token_ids, limits.vocab_size)
    if not 1 <= request.num_prompt_tokens <= len(request.token_ids):
        raise InvalidRequestError(
            "num_prompt_tokens", f"{request.num_prompt_tokens} is not in [1, {len(request.token_ids)} token_ids]"
        )
    check_sampling(request.sampling, limits)
    check_stopping(request.stopping, limits)
    num_earlier = len(request.token_ids) - request.num_prompt_tokens
    if num_earlier >= request.stopping.max_tokens:
        raise InvalidRequestError(
            "token_ids", f"earlier attempts emitted {num_earlier} of max_tokens = {request.stopping.max_tokens}"
        )
    check_logprobs(request.logprobs if request.HasField("logprobs") else None)


def _check_token_id(token_id: int, vocab_size: int, field: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(field, f"token id {token_id} is not in [0, vocab_size = {vocab_size})")
