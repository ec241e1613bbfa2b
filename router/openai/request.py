"""OpenAI request bodies to GenerateRequests. Values are checked by the router's own rules later; here only shapes."""

import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

from graftline.errors import InvalidRequestError
from graftline.proto import validation
from graftline.proto.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt
from graftline.router.openai.fields import Fields, integer, number

# Choices of all prompts of a body: as many as a worker lets wait by default. More of them are refused by
# workers one by one, and four times as many kept a prefill from answering for so long that it was taken for dead.
MAX_BODY_CHOICES = 1024
# Any number of up to ten digits; int() refuses some with thousands.
_TOKEN_ID = re.compile("[0-9]{1,10}")
_INT32 = (-(1 << 31), (1 << 31) - 1)
_INT64 = (-(1 << 63), (1 << 63) - 1)
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
    "spaces_between_special_tokens",
    "priority",
)
_UNSUPPORTED = (
    "tools",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "reasoning_effort",
    "echo",
    "suffix",
    "use_beam_search",
    "return_token_ids",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
)
_UNSUPPORTED_WHY = "this server does not support it"


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """A translated body.

    Attributes:
        requests: one a prompt; choices are numbered through.
        is_chat: which of the two shapes the answer takes.
        prompt_fields: where the prompt of each request stood in the body.
        renamed: what the client called fields of GenerateRequest, where that is another name.
        model: the name the client used, echoed.
    """

    requests: tuple[GenerateRequest, ...]
    prompt_fields: tuple[str, ...]
    renamed: Mapping[str, str]
    is_chat: bool
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return sum(request.n if request.HasField("n") else 1 for request in self.requests)

    def as_written(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error of the router, with the field as the client wrote it."""
        name = self.renamed.get(error.field)
        return error if name is None else InvalidRequestError(name, error.problem)


def chat_request(body: bytes) -> OpenAiRequest:
    """Translates a body of /v1/chat/completions.

    Raises:
        InvalidRequestError: naming the field.
    """
    fields = Fields.of_body(body)
    request = GenerateRequest(chat=_chat(fields.take("messages")))
    renamed: dict[str, str] = {}
    top_logprobs = fields.integer("top_logprobs", *_INT32)
    if fields.flag("logprobs"):
        request.logprobs = top_logprobs or 0
        renamed["logprobs"] = "top_logprobs"
    elif top_logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
    max_tokens = fields.integer("max_tokens", *_INT64)
    newer = fields.integer("max_completion_tokens", *_INT64)
    if newer is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    _read_common(fields, request, newer if newer is not None else max_tokens)
    _check_neutral(fields, "add_generation_prompt", True)
    _check_neutral(fields, "add_special_tokens", False)
    return _finished(fields, {"messages": request}, renamed, is_chat=True)


def completion_request(body: bytes) -> OpenAiRequest:
    """Translates a body of /v1/completions; a list of prompts gives several requests.

    Raises:
        InvalidRequestError: naming the field.
    """
    fields = Fields.of_body(body)
    template = GenerateRequest()
    logprobs = fields.take("logprobs")
    if logprobs is True:
        template.logprobs = 0
    elif logprobs is not None and logprobs is not False:
        template.logprobs = integer(logprobs, "logprobs", *_INT32)
    prompts = _prompts(fields.take("prompt"))
    max_tokens = fields.integer("max_tokens", *_INT64)
    _read_common(fields, template, max_tokens)
    _check_neutral(fields, "add_special_tokens", True)
    requests = {}
    for field, prompt in prompts.items():
        request = GenerateRequest()
        request.CopyFrom(template)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.CopyFrom(TokenPrompt(token_ids=prompt))
        requests[field] = request
    return _finished(fields, requests, {}, is_chat=False)


def _read_common(fields: Fields, request: GenerateRequest, max_tokens: int | None) -> None:
    if max_tokens is not None:
        request.max_tokens = max_tokens
    for name in ("temperature", "top_p", "min_p"):
        value = fields.number(name)
        if value is not None:
            setattr(request, name, value)
    for name, bounds in (("top_k", _INT32), ("n", _INT32), ("min_tokens", _INT64)):
        whole = fields.integer(name, *bounds)
        if whole is not None:
            setattr(request, name, whole)
    seed = fields.integer("seed", _INT64[0], validation.MAX_SEED)
    if seed is not None:
        request.seed = seed & validation.MAX_SEED
    request.ignore_eos = fields.flag("ignore_eos")
    request.stop.extend(_stop(fields.take("stop")))
    stop_token_ids = _list(fields.take("stop_token_ids"), "stop_token_ids", validation.MAX_STOP_TOKEN_IDS)
    request.stop_token_ids.extend(integer(token_id, "stop_token_ids", *_INT64) for token_id in stop_token_ids)
    biases = _object(fields.take("logit_bias"), "logit_bias")
    _check_count(biases, "logit_bias", validation.MAX_LOGIT_BIAS_ENTRIES)
    for token, bias in biases.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) >= 1 << 32:
            raise InvalidRequestError("logit_bias", f"{token[:40]!r} is not a token id")
        request.logit_bias[int(token)] = number(bias, "logit_bias")
    skips = fields.take("skip_special_tokens")
    if skips not in (None, True, False):
        raise InvalidRequestError("skip_special_tokens", "is not a boolean")
    request.keep_special_tokens = skips is False
    _check_neutral(fields, "presence_penalty", 0)
    _check_neutral(fields, "frequency_penalty", 0)
    _check_neutral(fields, "repetition_penalty", 1)
    _check_neutral(fields, "best_of", request.n or 1)
    _check_neutral(fields, "tool_choice", "none")
    _check_neutral(fields, "modalities", ["text"])
    _check_neutral(fields, "response_format", {"type": "text"})


def _finished(
    fields: Fields, requests: Mapping[str, GenerateRequest], renamed: Mapping[str, str], *, is_chat: bool
) -> OpenAiRequest:
    model = fields.text("model") or ""
    stream = fields.flag("stream")
    options = Fields(_object(fields.take("stream_options"), "stream_options"), "stream_options.")
    include_usage, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore(["include_obfuscation"])
    options.refuse_rest()
    if fields.take("prompt_logprobs") is not None:
        raise InvalidRequestError("prompt_logprobs", _UNSUPPORTED_WHY)
    fields.refuse(_UNSUPPORTED, _UNSUPPORTED_WHY)
    fields.ignore(_IGNORED)
    fields.refuse_rest()
    for request in requests.values():
        request.model = model
    n = next(iter(requests.values())).n
    if len(requests) > 1 and n * len(requests) > MAX_BODY_CHOICES:
        raise InvalidRequestError(
            "n", f"{n} choices of each of {len(requests)} prompts are more than {MAX_BODY_CHOICES}"
        )
    return OpenAiRequest(
        tuple(requests.values()), tuple(requests), renamed, is_chat, model, stream, include_usage, continuous
    )


def _chat(messages: Any) -> ChatPrompt:
    if messages is None:
        raise InvalidRequestError("messages", "is missing")
    items = _list(messages, "messages", validation.MAX_MESSAGES)
    return ChatPrompt(messages=[_message(item, index) for index, item in enumerate(items)])


def _message(item: Any, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    fields = Fields(_object(item, where))
    role = fields.take("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{where}.role", "is missing or not a string")
    content = fields.take("content")
    fields.ignore(["name", "tool_call_id", "annotations"])
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if fields.take(name):
            raise InvalidRequestError(f"{where}.{name}", _UNSUPPORTED_WHY)
    return ChatMessage(role="system" if role == "developer" else role, content=_content(content, f"{where}.content"))


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(where, "is missing or null")
    texts = []
    for index, part in enumerate(_list(content, where)):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{index}]", "is not a part of type text; nothing else is supported")
        texts.append(text)
    return "\n".join(texts)


def _prompts(prompt: Any) -> dict[str, str | list[int]]:
    """Prompts by where they stood in the body."""
    if prompt is None:
        raise InvalidRequestError("prompt", "is missing")
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, list):
        raise InvalidRequestError("prompt", "is neither a string nor a list")
    if not prompt:
        raise InvalidRequestError("prompt", "the list is empty")
    if isinstance(prompt[0], int | float):
        return {"prompt": _token_ids(prompt, "prompt")}
    if len(prompt) > validation.MAX_CHOICES:
        raise InvalidRequestError("prompt", f"{len(prompt)} prompts are more than {validation.MAX_CHOICES}")
    fields = {f"prompt[{index}]": item for index, item in enumerate(prompt)}
    return {
        field: item if isinstance(item, str) else _token_ids(_list(item, field), field)
        for field, item in fields.items()
    }


def _token_ids(items: list[Any], where: str) -> list[int]:
    if all(type(item) is int and 0 <= item < 1 << 32 for item in items):
        return items
    return [integer(item, f"{where}[{index}]", 0, (1 << 32) - 1) for index, item in enumerate(items)]


def _stop(stop: Any) -> list[str]:
    if isinstance(stop, str):
        return [stop]
    texts = _list(stop, "stop", validation.MAX_STOP_STRINGS)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"stop[{index}]", "is not a string")
    return texts


def _check_neutral(fields: Fields, name: str, neutral: Any) -> None:
    value = fields.take(name)
    if value is not None and value != neutral:
        raise InvalidRequestError(name, f"{str(value)[:80]} is not supported; leave it out or give {neutral}")


def _list(value: Any, where: str, most: int | None = None) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise InvalidRequestError(where, "is not a list")
    if value and most is not None:
        _check_count(value, where, most)
    return value or []


def _check_count(values: Sized, where: str, most: int) -> None:
    """Before anything is done for each of them."""
    if len(values) > most:
        raise InvalidRequestError(where, f"{len(values)} entries are more than {most}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise InvalidRequestError(where, "is not an object")
    return value or {}
