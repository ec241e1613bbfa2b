"""The default model itself: its tokenizer, its weights and what it says."""

import itertools
from functools import cache
from pathlib import Path

import gguf
import jinja2
import pytest
import regex
import torch
import transformers
from text_samples import TEXTS
from tokenizers import Tokenizer

from graftline.engine.model_fetch import CATALOG, DEFAULT_MODEL, resolve_model
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.reference import OneRequestKv, forward, greedy

WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_buffer(checkpoint.card.tokenizer_json)


@pytest.fixture(scope="module")
def package_reader(checkpoint: Checkpoint) -> gguf.GGUFReader:
    return gguf.GGUFReader(checkpoint.path)


class PlainBpe:
    """Byte-level BPE as published with GPT-2, digits split one by one first; slow and independent."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        fields = reader.fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self._specials = regex.compile("(" + "|".join(map(regex.escape, sorted(specials, key=len, reverse=True))) + ")")
        merges = fields["tokenizer.ggml.merges"].contents()
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        self._characters = {byte: chr(byte) for byte in plain} | {b: chr(256 + n) for n, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in self._specials.split(text):
            if self._specials.fullmatch(part):
                ids.append(self._ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in WORDS.findall(piece):
                    ids += self._merge(word)
        return ids

    def _merge(self, word: str) -> list[int]:
        symbols = [self._characters[byte] for byte in word.encode()]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, 1 << 30))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        return [self._ids[symbol] for symbol in symbols]


def test_token_ids_equal_a_plain_bpe(package_reader: gguf.GGUFReader, tokenizer: Tokenizer) -> None:
    reference = PlainBpe(package_reader)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_known_ids(tokenizer: Tokenizer) -> None:
    """Ids of the chat prefix, as the model was trained with."""
    ids = tokenizer.encode("<|im_start|>user\nHello 42<|im_end|>").ids
    assert ids == [1, 4093, 198, 19556, 216, 36, 34, 2]


def test_card(checkpoint: Checkpoint) -> None:
    card = checkpoint.card
    assert (card.model_id, card.vocab_size, card.context_length) == (DEFAULT_MODEL, 49152, 8192)
    assert (card.eos_token_ids, card.bos_token_id) == ((2,), -1)
    assert card.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in card.chat_template


def test_tensors_equal_the_package_s_reading(checkpoint: Checkpoint, package_reader: gguf.GGUFReader) -> None:
    tensors = {tensor.name: tensor for tensor in package_reader.tensors}
    for ours, theirs in (
        ("model.layers.17.mlp.down_proj.weight", "blk.17.ffn_down.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
    ):
        entry = tensors[theirs]
        expected = torch.from_numpy(gguf.dequantize(entry.data, entry.tensor_type).copy())
        assert torch.equal(checkpoint.tensor(ours), expected)


@cache
def float32_model(path: Path) -> DenseModel:
    checkpoint = open_checkpoint(path)
    return DenseModel(checkpoint, range(30), torch.float32)


def chat(checkpoint: Checkpoint, tokenizer: Tokenizer, question: str) -> list[int]:
    template = jinja2.Template(checkpoint.card.chat_template)
    text = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_the_answer_is_english_and_right(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    model = float32_model(checkpoint.path)
    ids = greedy(model, chat(checkpoint, tokenizer, "What is the capital of France?"), 16, eos_ids=[2])
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert ids[-1] == 2


def test_greedy_ids_equal_transformers(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    config = checkpoint.config
    oracle_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(oracle_config)
    names = [name for name in oracle.state_dict() if name != "lm_head.weight"]
    oracle.to_empty(device="cpu")
    oracle.load_state_dict({name: checkpoint.tensor(name) for name in names}, strict=False)
    oracle.tie_weights()
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle_config)
    prompt = chat(checkpoint, tokenizer, "Write a haiku about the sea, then explain it.")
    model = float32_model(checkpoint.path)
    with torch.no_grad():
        output = oracle.eval().generate(
            torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=2, pad_token_id=2
        )
        expected = oracle(torch.tensor([prompt])).logits[0]
    assert greedy(model, prompt, 48, eos_ids=[2]) == output[0, len(prompt) :].tolist()
    logits = forward(model, prompt, 0, OneRequestKv(model, len(prompt)))
    assert (logits - expected).abs().max() < 2e-3 * expected.std()


def test_catalogue_names_the_file(checkpoint: Checkpoint) -> None:
    assert checkpoint.path.name == CATALOG[DEFAULT_MODEL].file_name
    assert checkpoint.path.stat().st_size == CATALOG[DEFAULT_MODEL].num_bytes
