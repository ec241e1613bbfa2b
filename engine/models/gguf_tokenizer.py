"""A Hugging Face `tokenizer.json` built from a GGUF file's metadata.

Byte-level BPE only. The file names its pre-tokenizer; each known name maps to the splits of the original
tokenizer, and an unknown name is refused, because a wrong split gives wrong ids in silence.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graftline.errors import InvalidRequestError

_CONTROL, _USER_DEFINED = 3, 4

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _pre_tokenizer(name: str) -> dict[str, Any]:
    match name:
        case "gpt-2":
            return _byte_level(use_regex=True)
        case "smollm":
            # Digits one by one, then GPT-2's words.
            return _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
        case "llama-bpe":
            return _sequence(_split(_WORDS_OF_LLAMA3), _byte_level(use_regex=False))
        case "qwen2":
            return _sequence(_split(_WORDS_OF_QWEN2), _byte_level(use_regex=False))
    raise InvalidRequestError(
        "tokenizer.ggml.pre", f"{name!r} is not supported; supported: gpt-2, smollm, llama-bpe, qwen2"
    )


def tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """The tokenizer as the bytes of a `tokenizer.json`. It adds no tokens of its own around a text.

    Raises:
        InvalidRequestError: a kind of tokenizer, or a pre-tokenizer, that is not known; or a vocabulary that
            does not hang together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidRequestError("tokenizer.ggml.model", f"{kind!r} is not supported, only 'gpt2' (byte-level BPE)")
    pre = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", [])
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        raise InvalidRequestError("tokenizer.ggml.tokens", f"{len(tokens)} tokens of which {len(vocabulary)} differ")
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(tokens, metadata.get("tokenizer.ggml.token_type", [])),
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": _pre_tokenizer(pre),
            "post_processor": None,
            "decoder": _byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre == "llama-bpe",
                "vocab": vocabulary,
                "merges": metadata.get("tokenizer.ggml.merges", []),
            },
        },
        ensure_ascii=False,
    ).encode()


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a plain prompt gets the beginning-of-sequence token in front."""
    default = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
