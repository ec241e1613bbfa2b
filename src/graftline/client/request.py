"""What a caller asks for, and the message it becomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from graftline.errors import InvalidRequestError
from graftline.proto.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; roles are system, user, assistant, tool."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages."""


class GenerateOptions(TypedDict, total=False):
    """Options of a request; the router's defaults hold for those left out.

    Attributes:
        request_id: a label of the caller's own.
        model: needed when the router serves several.
        temperature: 0 is greedy; default: what the model's makers say, or 1. So with top_k, top_p and min_p.
        logprobs: number of top logprobs a token; 0 gives the emitted token's alone.
        n: independent choices.
        stop: texts that end a choice and are not returned.
    """

    request_id: str
    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int
    n: int
    logit_bias: Mapping[int, float]
    keep_special_tokens: bool


def request_of(prompt: Prompt, options: GenerateOptions) -> GenerateRequest:
    """The message for the router.

    Raises:
        InvalidRequestError: a value that the message cannot carry (the router checks all others).
    """
    request = GenerateRequest()
    for name, value in options.items():
        try:
            _set(request, name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(name, f"{str(value)[:80]!r}: {error}") from None
    try:
        _set_prompt(request, prompt)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError("prompt", str(error)) from None
    return request


def _set(request: GenerateRequest, name: str, value: object) -> None:
    if isinstance(value, Mapping):
        getattr(request, name).update(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        getattr(request, name).extend(value)
    else:
        setattr(request, name, value)


def _set_prompt(request: GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Message):
        messages = cast(Sequence[Message], prompt)
        turns = [ChatMessage(role=message.role, content=message.content) for message in messages]
        request.chat.CopyFrom(ChatPrompt(messages=turns))
    else:
        request.tokens.CopyFrom(TokenPrompt(token_ids=cast(Sequence[int], prompt)))
