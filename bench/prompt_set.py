"""Prompts from a JSONL file: one object a line with `messages`, `text` or `token_ids`, and perhaps `id`, `kind`."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from graftline.errors import InvalidRequestError

DEFAULT_PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
_MAX_FILE_BYTES = 256 << 20


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """One prompt in exactly one of three forms."""

    id: str = ""
    kind: str = ""
    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()


class PromptSet(msgspec.Struct, frozen=True):
    """Prompts of the chosen kinds, kinds taking turns, so that any first n of them cover every kind.

    Attributes:
        sha256: of the whole file, whatever was chosen from it.
    """

    name: str
    sha256: str
    kinds: tuple[str, ...]
    prompts: tuple[Prompt, ...]

    def slice(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts from `start` on, beginning again after the last."""
        return [self.prompts[(start + offset) % len(self.prompts)] for offset in range(count)]


def read_prompts(path: Path, kinds: Sequence[str] = ()) -> PromptSet:
    """Reads a prompt file; `kinds` empty means all.

    Raises:
        InvalidRequestError: not readable, a line that is no prompt (named by number), or an unknown kind.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequestError("prompts", f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError("prompts", f"cannot read {path}: {error.strerror}") from error
    by_kind: dict[str, list[Prompt]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            prompt = _read_line(line, f"{path}:{number}", number)
            by_kind.setdefault(prompt.kind, []).append(prompt)
    if unknown := [kind for kind in kinds if kind not in by_kind]:
        raise InvalidRequestError("kinds", f"{unknown[0]!r} is not in {path}; it holds {', '.join(sorted(by_kind))}")
    chosen = tuple(kinds) or tuple(by_kind)
    turns = zip_longest(*(by_kind[kind] for kind in chosen))
    prompts = tuple(prompt for turn in turns for prompt in turn if prompt is not None)
    if not prompts:
        raise InvalidRequestError("prompts", f"{path} holds no prompts")
    return PromptSet(path.name, hashlib.sha256(content).hexdigest(), chosen, prompts)


def _read_line(line: bytes, where: str, number: int) -> Prompt:
    try:
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.DecodeError as error:
        raise InvalidRequestError("prompts", f"{where} is no prompt: {error}") from error
    if (bool(prompt.messages) + bool(prompt.text) + bool(prompt.token_ids)) != 1:
        raise InvalidRequestError("prompts", f"{where} needs exactly one of messages, text and token_ids")
    return msgspec.structs.replace(prompt, id=prompt.id or f"line-{number}", kind=prompt.kind or "any")
