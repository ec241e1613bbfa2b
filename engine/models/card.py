"""What turns text into token ids and back for one model, and how it is found in a Hugging Face directory."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from graftline.engine.models.config import ModelConfig, read_generation_config, read_json, token_text
from graftline.engine.models.sampling_defaults import SamplingDefaults, sampling_defaults
from graftline.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ModelCardData:
    """A model as its users see it: what a router needs, and no weights.

    Attributes:
        tokenizer_json: bytes of a Hugging Face tokenizers file.
        chat_template: Jinja source; empty when the model takes no chat messages.
        special_tokens: named tokens a template may use ("bos_token" -> "<s>").
        bos_token_id: put before a plain prompt; -1 when none is.
    """

    model_id: str
    tokenizer_json: bytes
    chat_template: str
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def card_hash(self) -> str:
        """Equal cards are interchangeable; the model's name does not count. 32 hex digits."""
        rest = [
            self.chat_template,
            self.bos_token_id,
            self.eos_token_ids,
            self.context_length,
            self.vocab_size,
            sorted(self.special_tokens.items()),
        ]
        if self.sampling != SamplingDefaults():  # so that cards without have the hash that earlier versions give them
            rest.append(astuple(self.sampling))
        digest = hashlib.sha256(json.dumps(rest).encode())
        digest.update(self.tokenizer_json)
        return digest.hexdigest()[:32]


def read_card(path: Path, config: ModelConfig) -> ModelCardData:
    """The card of a Hugging Face directory.

    Raises:
        InvalidRequestError: no readable `tokenizer.json`, or sampling defaults that no request could have.
    """
    tokenizer_path = path / "tokenizer.json"
    try:
        content = tokenizer_path.read_bytes()
    except OSError as error:
        raise InvalidRequestError("model", f"cannot read {tokenizer_path}: {error.strerror}") from error
    tokenizer = load_tokenizer(content, tokenizer_path)
    settings_path = path / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    special_tokens = _special_tokens(path, settings)
    adds_bos = bool(settings.get("add_bos_token"))
    return ModelCardData(
        model_id=path.resolve().name,
        tokenizer_json=content,
        chat_template=_chat_template(path, settings),
        bos_token_id=_leading_token(tokenizer, special_tokens.get("bos_token") if adds_bos else None),
        eos_token_ids=config.eos_token_ids,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        special_tokens=special_tokens,
        sampling=sampling_defaults(read_generation_config(path)),
    )


def load_tokenizer(content: bytes, origin: Path) -> tokenizers.Tokenizer:
    """The tokenizer in `content`, which came from `origin`.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequestError("model", f"the tokenizer of {origin} cannot be used: {error}") from error


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str:
    own_file = path / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return str(template or "")


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    map_path = path / "special_tokens_map.json"
    named = {**(read_json(map_path) if map_path.exists() else {}), **settings}
    found = {}
    for name, value in named.items():
        text = token_text(value)
        if name.endswith("_token") and text is not None:
            found[name] = text
    return found


def _leading_token(tokenizer: tokenizers.Tokenizer, bos: str | None) -> int:
    """The token the tokenizer puts first of all, found by trying: post-processors can be of any form. Else `bos`."""
    bare, dressed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    if len(dressed) > len(bare) and dressed[:1] != bare[:1]:
        return int(dressed[0])
    token_id = None if bos is None else tokenizer.token_to_id(bos)
    return -1 if token_id is None else int(token_id)
