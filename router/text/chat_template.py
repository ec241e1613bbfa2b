"""Chat messages to prompt text with a model's own Jinja template, by Hugging Face's conventions.

The template runs in a sandbox. Whatever goes wrong in it is the request's error, with the template's own words.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from graftline.errors import IncompatibleError, InvalidRequestError

ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Prompt text in which special tokens that users typed are replaced by markers.

    Attributes:
        text: what the template made.
        literals: marker -> the text it stands for.
    """

    text: str
    literals: Mapping[str, str]

    def with_literals(self, text: str) -> str:
        """Puts what users typed back in place of the markers."""
        for marker, literal in self.literals.items():
            text = text.replace(marker, literal)
        return text


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source.
        special_tokens: named tokens the template may use (bos_token, eos_token, ...).

    Raises:
        IncompatibleError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise IncompatibleError(("chat_template",), f"the model card's chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], special_texts: Iterable[str] = ()) -> RenderedChat:
        """Renders a chat up to where the assistant's answer begins.

        Args:
            messages: at least one, and not the assistant's alone.
            special_texts: the texts of the tokenizer's special tokens.

        Raises:
            InvalidRequestError: a bad message list, or an error raised by the template, with its text.
        """
        check_messages(messages)
        contents, literals = _without_special_texts([message.content for message in messages], special_texts)
        turns = [
            {"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)
        ]
        try:
            text = self._template.render(
                **self._special_tokens, messages=turns, tools=None, documents=None, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("messages", f"the chat template says: {error or type(error).__name__}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
            raise InvalidRequestError(
                "messages", f"the chat template failed: {type(error).__name__}: {error}"
            ) from error
        return RenderedChat(text, literals)


def check_messages(messages: Sequence[Message]) -> None:
    """What holds for every template.

    Raises:
        InvalidRequestError: no messages, an unknown role, or nothing but assistant turns.
    """
    if not messages:
        raise InvalidRequestError("messages", "the list is empty")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequestError(
                f"messages[{index}].role", f"{message.role!r} is none of {', '.join(sorted(ROLES))}"
            )
    if all(message.role == "assistant" for message in messages):
        raise InvalidRequestError("messages", "there are only assistant messages; nothing is left to answer")


def _without_special_texts(contents: Sequence[str], special_texts: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Replaces special-token texts by markers that no tokenizer knows and no user can guess."""
    cleaned = list(contents)
    literals: dict[str, str] = {}
    nonce = secrets.token_hex(8)
    for special in sorted(special_texts, key=len, reverse=True):
        if not special or not any(special in content for content in cleaned):
            continue
        marker = f"\U000f0000{nonce}.{len(literals)}\U000f0001"
        literals[marker] = special
        cleaned = [content.replace(special, marker) for content in cleaned]
    return cleaned, literals


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
