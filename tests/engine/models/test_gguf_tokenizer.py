"""Tokenizers rebuilt from GGUF metadata against their originals, and against a plain BPE of our own."""

import json
from typing import Any

import pytest
import tokenizers
from text_samples import TEXTS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from graftline.engine.models.gguf_tokenizer import adds_bos, tokenizer_json
from graftline.errors import InvalidRequestError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As the originals have them (their tokenizer.json files).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def original(pre: str) -> Tokenizer:
    """A small tokenizer of the family that GGUF calls `pre`, trained on the samples."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    words = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }
    tokenizer.pre_tokenizer = words[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *("the 1234 world's code = {x: 56};\n" * 3 for _ in range(20))], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes for it."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    kinds = [3 if token in SPECIALS else 4 if token == "<think>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_and_text_equal_the_original(pre: str) -> None:
    expected = original(pre)
    rebuilt = Tokenizer.from_buffer(tokenizer_json(metadata_of(expected, pre)))
    differing_from_gpt2 = 0
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert rebuilt.encode(text).ids == ids, text
        assert rebuilt.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
        assert rebuilt.decode(ids) == expected.decode(ids)
        wrong = Tokenizer.from_buffer(tokenizer_json({**metadata_of(expected, pre), "tokenizer.ggml.pre": "gpt-2"}))
        differing_from_gpt2 += wrong.encode(text).ids != ids
    # The samples tell the pre-tokenizers apart.
    assert (differing_from_gpt2 == 0) == (pre == "gpt-2")


def test_special_tokens_are_one_token_and_skipped_in_text() -> None:
    rebuilt = Tokenizer.from_buffer(tokenizer_json(metadata_of(original("smollm"), "smollm")))
    ids = rebuilt.encode("<|im_start|>a<think>").ids
    assert ids[0] == rebuilt.token_to_id("<|im_start|>")
    assert ids[-1] == rebuilt.token_to_id("<think>")
    assert rebuilt.decode(ids) == "a<think>"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model.*'llama'.*gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre.*'tekken'.*smollm"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "2 tokens of which 1"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], says: str) -> None:
    plain = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b"]}
    with pytest.raises(InvalidRequestError, match=says):
        tokenizer_json({**plain, **changes})


def test_who_gets_a_leading_bos() -> None:
    assert adds_bos({"tokenizer.ggml.pre": "llama-bpe"})
    assert not adds_bos({"tokenizer.ggml.pre": "smollm"})
    assert not adds_bos({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    assert adds_bos({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True})
