"""GGUF files against the Hugging Face models they were written from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_writing import interleave_rope, write_gguf

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.gguf_checkpoint import split_rope_pairs
from graftline.engine.models.gguf_config import gguf_name
from graftline.engine.models.gguf_file import GgufFile
from graftline.engine.models.reference import OneRequestKv, forward
from graftline.engine.models.rope import DivisorScaling, LinearScaling, YarnScaling
from graftline.errors import InvalidRequestError

TOKENS = [*"abcdefg", *(f"<{n}>" for n in range(89)), "ab"]


def fields(architecture: str, **changes: Any) -> dict[str, Any]:
    values = {
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        **changes,
    }
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": ["a b"], "token_type": [1] * 97}
    ids = {"bos_token_id": 7, "eos_token_id": 8, "eot_token_id": 9}
    return named | {f"tokenizer.ggml.{name}": value for name, value in (tokenizer | ids).items()}


def converted(path: Path, architecture: str, save_tiny: Any, kind: str, model: dict[str, Any], **more: Any) -> Any:
    """A GGUF file with the weights of a tiny transformers model, and that model."""
    _, oracle = save_tiny(kind, **model)
    tied = model.get("tie_word_embeddings", False)
    tensors = {name: value for name, value in oracle.state_dict().items() if not (tied and name == "lm_head.weight")}
    changes = more.pop("changes", {})
    write_gguf(path, architecture, fields(architecture, **changes), tensors, heads=(6, 2), **more)
    return oracle


@pytest.mark.parametrize(
    ("architecture", "kind", "model", "changes"),
    [
        ("llama", "Llama", {}, {}),
        ("llama", "Llama", {"tie_word_embeddings": True}, {}),
        ("llama", "Llama", {"attention_bias": True}, {}),
        ("llama", "Llama", {"head_dim": 16}, {"attention.key_length": 16, "attention.value_length": 16}),
        ("llama", "Mistral", {"sliding_window": None}, {}),
        ("qwen2", "Qwen2", {}, {}),
        ("qwen3", "Qwen3", {"head_dim": 16}, {"attention.key_length": 16}),
        (
            "llama",
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
        (
            "qwen2",
            "Qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        ),
    ],
)
def test_logits_equal_the_original(
    architecture: str, kind: str, model: dict[str, Any], changes: dict[str, Any], save_tiny: Any, tmp_path: Path
) -> None:
    oracle = converted(tmp_path / "m.gguf", architecture, save_tiny, kind, model, changes=changes)
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = oracle(ids.unsqueeze(0)).logits[0]
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    ours = DenseModel(checkpoint, range(3), torch.float32)
    assert (forward(ours, ids.tolist(), 0, OneRequestKv(ours, 40)) - expected).abs().max() <= 1e-4
    assert checkpoint.config.tie_embeddings == model.get("tie_word_embeddings", False)


def test_tensors_are_bitwise_those_of_the_original(save_tiny: Any, tmp_path: Path) -> None:
    oracle = converted(tmp_path / "m.gguf", "llama", save_tiny, "Llama", {"attention_bias": True})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name, expected in oracle.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), expected), name


def test_quantised_rows_are_put_back_in_order_too(save_tiny: Any, tmp_path: Path) -> None:
    model = {"hidden_size": 64, "num_attention_heads": 8}
    changes = {"embedding_length": 64, "attention.head_count": 8}
    _, oracle = save_tiny("Llama", **model, intermediate_size=96)
    changes["feed_forward_length"] = 96
    write_gguf(
        tmp_path / "q.gguf",
        "llama",
        fields("llama", **changes),
        oracle.state_dict(),
        heads=(8, 2),
        kind=GGMLQuantizationType.Q8_0,
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    close = open_checkpoint(tmp_path / "q.gguf").tensor(name)
    torch.testing.assert_close(close, oracle.state_dict()[name], rtol=0, atol=0.02)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 4), (2, 64)])
def test_rope_orders_are_inverse(heads: int, head_dim: int) -> None:
    rows = torch.arange(heads * head_dim * 5).reshape(heads * head_dim, 5)
    assert torch.equal(split_rope_pairs(interleave_rope(rows, heads), heads), rows)
    assert head_dim == 2 or not torch.equal(interleave_rope(rows, heads), rows)


def write(path: Path, architecture: str = "llama", extra: Any = None, **changes: Any) -> Path:
    embedding = {"model.embed_tokens.weight": torch.zeros(97, 48)}
    return write_gguf(path / "m.gguf", architecture, fields(architecture, **changes), embedding, extra=extra)


def test_config_from_metadata(tmp_path: Path) -> None:
    config = open_checkpoint(write(tmp_path)).config
    assert (config.num_layers, config.hidden_size, config.head_dim, config.num_kv_heads) == (3, 48, 8, 2)
    assert (config.vocab_size, config.context_length, config.rms_norm_eps) == (97, 256, 1e-6)
    assert (config.eos_token_ids, config.bos_token_id) == ((8, 9), 7)
    assert config.rope.scaling is None


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 2.0,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            YarnScaling(4.0, 64, 16.0, 1.0, pytest.approx(2 * 1.1386294), True),
        ),
    ],
)
def test_rope_scaling(changes: dict[str, Any], scaling: Any, tmp_path: Path) -> None:
    assert open_checkpoint(write(tmp_path, **changes)).config.rope.scaling == scaling


def test_rope_divisors_come_from_their_tensor(tmp_path: Path) -> None:
    path = write(tmp_path, extra={"rope_freqs.weight": torch.tensor([1.0, 1.0, 2.0, 8.0])})
    assert open_checkpoint(path).config.rope.scaling == DivisorScaling((1.0, 1.0, 2.0, 8.0))


def test_a_window_limits_the_context(tmp_path: Path) -> None:
    config = open_checkpoint(write(tmp_path, **{"attention.sliding_window": 64})).config
    assert (config.context_length, config.sliding_window) == (64, 64)


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("mamba", {}, r"general\.architecture.*'mamba'.*llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"rope.dimension_count": 4}, r"rope\.dimension_count.*4.*8"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "longrope"),
        ("llama", {"rope.scaling.type": "linear"}, r"scaling\.factor.*None"),
        ("llama", {"block_count": "three"}, "block_count.*three"),
    ],
)
def test_what_is_refused_is_named(architecture: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        open_checkpoint(write(tmp_path, architecture, **changes))


def test_whether_there_is_a_tensor_is_told_without_reading_it(
    save_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = converted(tmp_path / "tiny.gguf", "qwen2", save_tiny, "Qwen2", {})
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    monkeypatch.delattr(GgufFile, "tensor")
    assert all(checkpoint.has_tensor(name) for name in oracle.state_dict())
    assert not checkpoint.has_tensor("model.layers.9.mlp.up_proj.weight")
    assert not checkpoint.has_tensor("mtp.fc.weight")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    for name in ("model.norm.weight", "model.layers.0.mlp.experts.weight", "nonsense"):
        with pytest.raises(InvalidRequestError, match=f"no tensor {name}"):
            checkpoint.tensor(name)


def test_card(tmp_path: Path) -> None:
    path = write(tmp_path)
    by_file, by_folder = open_checkpoint(path), open_checkpoint(tmp_path)
    assert (by_file.card.model_id, by_folder.card.model_id) == ("m", tmp_path.name)
    assert by_file.card.card_hash == by_folder.card.card_hash
    assert by_file.model_hash == by_folder.model_hash
    assert by_file.card.special_tokens == {"bos_token": "<0>", "eos_token": "<1>"}
    assert (by_file.card.vocab_size, by_file.card.context_length, by_file.card.bos_token_id) == (97, 256, -1)
    assert by_file.card.eos_token_ids == (8, 9)


def test_a_vocabulary_that_does_not_hang_together(tmp_path: Path) -> None:
    metadata = {**fields("llama"), "tokenizer.ggml.merges": ["no such"]}
    write_gguf(tmp_path / "m.gguf", "llama", metadata, {"model.embed_tokens.weight": torch.zeros(97, 48)})
    with pytest.raises(InvalidRequestError, match=r"m\.gguf cannot be used.*no"):
        _ = open_checkpoint(tmp_path).card


def test_parts_are_refused(tmp_path: Path) -> None:
    metadata = {**fields("llama"), "split.count": 3}
    write_gguf(tmp_path / "m.gguf", "llama", metadata, {"model.embed_tokens.weight": torch.zeros(97, 48)})
    with pytest.raises(InvalidRequestError, match="one of 3 parts"):
        open_checkpoint(tmp_path)


def test_names() -> None:
    assert gguf_name("model.layers.12.self_attn.q_norm.weight") == "blk.12.attn_q_norm.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.weight")
