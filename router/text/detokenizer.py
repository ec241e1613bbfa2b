"""Token ids to text as they come, so that the pieces add up to the whole whatever the split.

Two families of vocabularies say for each token which bytes it stands for: byte-level BPE, and sentencepiece
style with byte fallback. Their text is an incremental UTF-8 decoding of those bytes: an incomplete character is
held back and, when the stream ends inside it, flushed as U+FFFD. Other decoders look at neighbouring tokens;
for them a window of recent tokens is decoded again.
"""

import codecs
from collections.abc import Callable
from typing import Any, Protocol

from graftline.router.text.tokenizer import TextTokenizer

TokenBytes = Callable[[int], bytes]
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one output."""

    def feed(self, token_id: int) -> str:
        """Takes the next token; returns the text that became final, which may be empty."""

    def flush(self) -> str:
        """No more tokens will come: returns the rest."""


class Vocabulary:
    """How token ids read; one per model, shared by all its outputs."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._special_ids = frozenset(token.token_id for token in tokenizer.special_tokens.values())
        self._family = _family(tokenizer.description.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self, *, keep_special_tokens: bool = False, goes_on: bool = False) -> Detokenizer:
        """For a new output.

        Args:
            goes_on: the output continues a text: sentencepiece's mark in front of its first word is a space then, and
                not the beginning.
        """
        skipped = frozenset() if keep_special_tokens else self._special_ids
        if self._family is None:
            return _WindowDetokenizer(lambda ids: self._decode(ids, keep_special_tokens))
        return _ByteDetokenizer(self.token_bytes, skipped, self._family.strips_first_space and not goes_on)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a single token stands for; empty for ids without a token (padding of the vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A single token as text, for display; broken characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._family is None:
            return self._decode([token_id], True).encode()
        return self._family.read(token)

    def _decode(self, token_ids: list[int], keep_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special_tokens)
        return text


class _ByteDetokenizer:
    """Bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int], strips_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._at_start = strips_first_space
        self._decoder = _Utf8Decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._token_bytes(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes the tokens since a point that was complete before, and again with the new token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text, known = self._decode(self._window), self._decode(self._window[: self._num_context])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        text, known = self._decode(self._window), self._decode(self._window[: self._num_context])
        self._num_context = len(self._window)
        return text[len(known) :]


class _ByteLevel:
    """GPT-2 style: every byte is written as one printable character."""

    strips_first_space = False

    def __init__(self) -> None:
        self._byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}

    def read(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


class _ByteFallback:
    """Sentencepiece style: a mark stands for a space, `<0xE2>` for a byte."""

    def __init__(self, space_mark: str, strips_first_space: bool) -> None:
        self._space_mark = space_mark
        self.strips_first_space = strips_first_space

    def read(self, token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(self._space_mark, " ").encode()


def byte_level_alphabet() -> tuple[str, ...]:
    """The character that stands for each byte in byte-level vocabularies (256 of them)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars: dict[int, str] = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(256 + len(chars) - len(printable))
    return tuple(chars[byte] for byte in range(256))


def _family(decoder: dict[str, Any] | None) -> _ByteLevel | _ByteFallback | None:
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return _ByteLevel()
    if decoder["type"] == "Metaspace":
        return _ByteFallback(decoder.get("replacement", "▁"), decoder.get("prepend_scheme", "always") != "never")
    if decoder["type"] != "Sequence":
        return None
    parts: list[dict[str, Any]] = decoder["decoders"]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _ByteLevel()
    replaces = [part for part in parts if part["type"] == "Replace" and part.get("content") == " "]
    strips = [part for part in parts if part["type"] == "Strip"]
    strips_one_space = all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strips)
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and len(replaces) == 1 and strips_one_space:
        mark = replaces[0]["pattern"].get("String", "▁")
        return _ByteFallback(mark, bool(strips))
    return None
