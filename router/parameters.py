"""A client's request as checked values: what it asks for, and what that comes to once the prompt is known."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from graftline.errors import InvalidRequestError
from graftline.proto import validation
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.router.model import ServedModel

_MASK_64 = (1 << 64) - 1


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
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if 0 <= temperature < validation.MIN_TEMPERATURE:
            temperature = 0.0
        validation.check_temperature(temperature)
        top_k = max(request.top_k, 0) if request.top_k >= -1 else request.top_k
        validation.check_top_k(top_k)
        top_p = request.top_p if request.HasField("top_p") else 1.0
        validation.check_top_p(top_p)
        validation.check_min_p(request.min_p)
        validation.check_logit_bias(request.logit_bias, model.vocab_size)
        max_tokens = request.max_tokens if request.HasField("max_tokens") else None
        if max_tokens is not None:
            validation.check_max_tokens(max_tokens)
        validation.check_min_tokens(request.min_tokens, validation.MAX_MAX_TOKENS if max_tokens is None else max_tokens)
        validation.check_stop_strings(request.stop)
        validation.check_stop_token_ids(request.stop_token_ids, model.vocab_size)
        logprobs = request.logprobs if request.HasField("logprobs") else None
        validation.check_logprobs(logprobs)
        num_choices = request.n if request.HasField("n") else 1
        validation.check_num_choices(num_choices)
        return cls(
            temperature=temperature,
            top_k=min(top_k, model.vocab_size),
            top_p=top_p,
            min_p=request.min_p,
            seed=request.seed if request.HasField("seed") else secrets.randbits(64),
            logit_bias=tuple(request.logit_bias.items()),
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            logprobs=None if logprobs is None else min(logprobs, model.vocab_size),
            num_choices=num_choices,
            keep_special_tokens=request.keep_special_tokens,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A request ready to run: prompt ids, and limits that fit them.

    Attributes:
        ending_ids: token ids that end a choice.
    """

    model: ServedModel
    prompt_ids: tuple[int, ...]
    parameters: Parameters
    max_tokens: int
    ending_ids: frozenset[int]

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
    ) -> "Plan":
        """Fits the output to what the prompt leaves of the context.

        Args:
            max_request_tokens: longest prompt plus output that can be served.
            max_prompt_tokens: longest prompt with one output token that can be computed.
            default_max_tokens: when the client named none; None: all that is left.
            field: the name of the prompt's field.

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
        return cls(model, tuple(prompt_ids), parameters, max_tokens, eos | frozenset(parameters.stop_token_ids))

    def sampling(self, choice: int) -> SamplingParams:
        """Sampling parameters of one choice."""
        p = self.parameters
        return SamplingParams(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=choice_seed(p.seed, choice),
            logit_bias=dict(p.logit_bias),
        )

    def stopping(self) -> StoppingParams:
        """Stopping parameters of every choice and attempt."""
        return StoppingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.parameters.min_tokens,
            ignore_eos=self.parameters.ignore_eos,
            stop_token_ids=self.parameters.stop_token_ids,
        )


def choice_seed(seed: int, choice: int) -> int:
    """Seeds of independent choices: the request's own for the first, mixed ones (splitmix64) for the others."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)
