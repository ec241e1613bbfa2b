"""Text to token ids, from the bytes of a model card.

Prompt text that a caller composed itself is encoded as it stands: special tokens written in it count as such,
because completion prompts carry whole templates. Chat content is different: a user who types `<|im_end|>` must
not end his own turn. `encode_chat` gives template text its special tokens and user text none.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from graftline.errors import IncompatibleError
from graftline.router.text.chat_template import RenderedChat


@dataclass(frozen=True, slots=True)
class _AddedToken:
    token_id: int
    content: str
    lstrip: bool
    rstrip: bool

    @property
    def pattern(self) -> str:
        before, after = (r"\s*" if self.lstrip else ""), (r"\s*" if self.rstrip else "")
        return f"{before}{re.escape(self.content)}{after}"


class TextTokenizer:
    """Encodes prompts. Thread-safe after construction.

    Args:
        tokenizer_json: a Hugging Face tokenizers file.
        bos_token_id: put before a plain text prompt; -1 for none.

    Attributes:
        longest_token_chars: no token stands for more characters of a text; None where that cannot be told.

    Raises:
        IncompatibleError: the file cannot be read as a tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, bos_token_id: int = -1) -> None:
        self._json = tokenizer_json
        self._bos_token_id = bos_token_id
        self.tokenizer = _load(tokenizer_json)
        self.description: dict[str, Any] = json.loads(tokenizer_json)
        self.special_tokens = {token.content: token for token in _special_tokens(self.description)}
        self.longest_token_chars = _longest_token_chars(self.description)
        self._special_pattern = re.compile("|".join(_longest_first(self.special_tokens)) or r"(?!)")

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """Encodes special tokens as the plain text they look like; built on first need, which is rare."""
        return _literal(self._json)

    @cached_property
    def _later_literal_tokenizer(self) -> Tokenizer:
        """The same behind the beginning of a text, before which alone some vocabularies of sentencepiece put a mark."""
        changed = _without_first_mark(self.description)
        return self._literal_tokenizer if changed is None else _literal(json.dumps(changed).encode())

    def encode_text(self, text: str) -> list[int]:
        """Ids of a prompt that the caller composed; the model's BOS is put before it unless it is there already."""
        ids = _encode(self.tokenizer, text)
        if self._bos_token_id >= 0 and ids[:1] != [self._bos_token_id]:
            ids.insert(0, self._bos_token_id)
        return ids

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Ids of a rendered chat: special tokens of the template count, those in message contents are text."""
        if not chat.literals:
            return _encode(self.tokenizer, chat.text)
        return [token_id for piece in self._pieces(chat) for token_id in piece]

    def _pieces(self, chat: RenderedChat) -> list[list[int]]:
        pieces: list[list[int]] = []
        end = 0
        for match in self._special_pattern.finditer(chat.text):
            pieces.append(self._encode_literal(chat, end, match.start()))
            pieces.append([self._special_id(match.group())])
            end = match.end()
        pieces.append(self._encode_literal(chat, end, len(chat.text)))
        return pieces

    def _encode_literal(self, chat: RenderedChat, start: int, end: int) -> list[int]:
        tokenizer = self._later_literal_tokenizer if start else self._literal_tokenizer
        return _encode(tokenizer, chat.with_literals(chat.text[start:end]))

    def _special_id(self, matched: str) -> int:
        token = self.special_tokens.get(matched) or self.special_tokens[matched.strip()]
        return token.token_id


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # The batch call lets other threads run meanwhile; the plain one holds the interpreter for its whole time
    # (2.4 s for a megabyte that this one encodes in 0.3 s).
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise IncompatibleError(("tokenizer_json",), f"the model card's tokenizer cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _literal(tokenizer_json: bytes) -> Tokenizer:
    """A tokenizer to which special tokens are the plain text they look like."""
    tokenizer = _load(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_first_mark(description: dict[str, Any]) -> dict[str, Any] | None:
    """The description of a tokenizer that puts no mark at the beginning; None where it puts none there alone."""
    parts = _parts(description.get("pre_tokenizer"))
    changed = [{**part, "prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else part for part in parts]
    if changed == parts:
        return None
    return {**description, "pre_tokenizer": {"type": "Sequence", "pretokenizers": changed}}


def _special_tokens(description: dict[str, Any]) -> list[_AddedToken]:
    return [
        _AddedToken(entry["id"], entry["content"], entry.get("lstrip", False), entry.get("rstrip", False))
        for entry in description.get("added_tokens") or ()
        if entry.get("special")
    ]


def _longest_token_chars(description: dict[str, Any]) -> int | None:
    """Of a byte-level tokenizer that neither drops nor rewrites text: its vocabulary has a character for every byte, of
    which a character of text has one or more.
    """
    parts = _parts(description.get("pre_tokenizer"))
    model, added = description.get("model") or {}, description.get("added_tokens") or ()
    if (
        model.get("type") != "BPE"
        or model.get("unk_token")
        or description.get("normalizer")
        or not any(part.get("type") == "ByteLevel" for part in parts)
        or not all(_keeps_text(part) for part in parts)
        or any(entry.get("lstrip") or entry.get("rstrip") for entry in added)
    ):
        return None
    return max([*map(len, model.get("vocab") or ()), *(len(entry["content"]) for entry in added)], default=None)


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]


def _keeps_text(part: dict[str, Any]) -> bool:
    if part.get("type") == "Split":
        return part.get("behavior") != "Removed"
    return part.get("type") in {"ByteLevel", "Digits"}


def _longest_first(tokens: dict[str, _AddedToken]) -> list[str]:
    return [token.pattern for token in sorted(tokens.values(), key=lambda token: -len(token.content))]
