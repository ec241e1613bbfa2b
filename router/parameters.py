"""A client's request as checked values: what it asks for, and what that comes to once the prompt is known."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graftline.errors import InvalidRequestError
from graftline.proto import validation
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.router.model import ServedModel

_MASK_64 = (1 << 64) - 1


def _temperature(given: float) -> float:
    """Greedy when it is too small to tell from greedy."""
    return 0.0 if 0 <= given < validation.MIN_TEMPERATURE else given


def _top_k(given: int) -> int:
    """-1 and 0 are no limit."""
    return 0 if given == -1 else given


# What holds for single fields of a request: their values, and the size of the vocabulary.
_CHECKS: dict[str, Callable[[Any, int], None]] = {
    "temperature": lambda value, _: validation.check_temperature(_temperature(value)),
    "top_k": lambda value, _: validation.check_top_k(_top_k(value)),
    "top_p": lambda value, _: validation.check_top_p(value),
    "min_p": lambda value, _: validation.check_min_p(value),
    "logit_bias": validation.check_logit_bias,
    "max_tokens": lambda value, _: validation.check_max_tokens(value),
    "stop": lambda value, _: validation.check_stop_strings(value),
    "stop_token_ids": validation.check_stop_token_ids,
    "logprobs": lambda value, _: validation.check_logprobs(value),
    "n": lambda value, _: validation.check_num_choices(value),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything of a request but its prompt, checked.

    Attributes:
        seed: of the first choice; drawn here when the client gave none.
        max_tokens: None when the client named none.
        top_k: 0 is no limit.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    num_choices: int
    keep_special_tokens: bool

    @classmethod
    def of(cls, request: GenerateRequest, model: ServedModel) -> "Parameters":
        """Checks a request.

        Raises:
            InvalidRequestError: naming the field and the value.
        """
        # Only what is given is looked at: requests set few of the fields, and asking for one costs more than its check.
        given: dict[str, Any] = {**model.sampling_defaults}
        given.update((field.name, value) for field, value in request.ListFields())
        for name, value in given.items():
            check = _CHECKS.get(name)
            if check is not None:
                check(value, model.vocab_size)
        get = given.get
        max_tokens, min_tokens = get("max_tokens"), get("min_tokens", 0)
        if min_tokens:
            most = validation.MAX_MAX_TOKENS if max_tokens is None else max_tokens
            validation.check_min_tokens(min_tokens, most)
        seed, logprobs = get("seed"), get("logprobs")
        return cls(
            temperature=_temperature(get("temperature", 1.0)),
            top_k=min(_top_k(get("top_k", 0)), model.vocab_size),
            top_p=get("top_p", 1.0),
            min_p=get("min_p", 0.0),
            seed=secrets.randbits(64) if seed is None else seed,
            logit_bias=tuple(get("logit_bias", {}).items()),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=get("ignore_eos", False),
            stop=tuple(get("stop", ())),
            stop_token_ids=tuple(get("stop_token_ids", ())),
            logprobs=None if logprobs is None else min(logprobs, model.vocab_size),
            num_choices=get("n", 1),
            keep_special_tokens=get("keep_special_tokens", False),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A request ready to run: prompt ids, and limits that fit them.

    Attributes:
        ending_ids: token ids that end a choice.
        goes_on: the output continues a text, and is no turn of a chat.
    """

    model: ServedModel
    prompt_ids: tuple[int, ...]
    parameters: Parameters
    max_tokens: int
    ending_ids: frozenset[int]
    goes_on: bool

    @classmethod
    def of(
        cls,
        model: ServedModel,
        prompt_ids: Sequence[int],
        parameters: Parameters,
        *,
        max_request_tokens: int,
        max_prompt_tokens: int,
        default_max_tokens: int | None,
        field: str,
        goes_on: bool,
    ) -> "Plan":
        """Fits the output to what the prompt leaves of the context.

        Args:
            max_request_tokens: longest prompt plus output that can be served.
            max_prompt_tokens: longest prompt with one output token that can be computed.
            default_max_tokens: when the client named none; None: all that is left.
            field: the name of the prompt's field.
            goes_on: the prompt is no chat.

        Raises:
            InvalidRequestError: no tokens, ids outside the vocabulary, no room for output.
        """
        validation.check_token_ids(prompt_ids, model.vocab_size, field=field)
        validation.check_prompt_fits(len(prompt_ids), min(max_request_tokens, max_prompt_tokens), field=field)
        room = max_request_tokens - len(prompt_ids)
        wanted = parameters.max_tokens or default_max_tokens or room
        max_tokens = min(wanted, room)
        if parameters.min_tokens > max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"{parameters.min_tokens} exceed the {max_tokens} tokens that may be generated"
            )
        eos = frozenset() if parameters.ignore_eos else model.eos_token_ids
        ending_ids = eos | frozenset(parameters.stop_token_ids)
        return cls(model, tuple(prompt_ids), parameters, max_tokens, ending_ids, goes_on)

    def fill(self, request: DecodeServiceGenerateRequest, choice: int) -> None:
        """Writes what is the same for every attempt of a choice into a request that has none of it."""
        p = self.parameters
        request.num_prompt_tokens = len(self.prompt_ids)
        sampling = request.sampling
        sampling.temperature = p.temperature
        sampling.top_k = p.top_k
        sampling.top_p = p.top_p
        sampling.min_p = p.min_p
        sampling.seed = choice_seed(p.seed, choice)
        for token_id, bias in p.logit_bias:
            sampling.logit_bias[token_id] = bias
        stopping = request.stopping
        stopping.max_tokens = self.max_tokens
        stopping.min_tokens = p.min_tokens
        stopping.ignore_eos = p.ignore_eos
        stopping.stop_token_ids.extend(p.stop_token_ids)
        if p.logprobs is not None:
            request.logprobs = p.logprobs


def choice_seed(seed: int, choice: int) -> int:
    """Seeds of independent choices: the request's own for the first, mixed ones (splitmix64) for the others."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)
