"""Configs as files have them, and the ones that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from graftline.engine.models.config import Family, ModelConfig, config_from_dict, read_config
from graftline.engine.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from graftline.errors import InvalidRequestError

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def config(**changes: Any) -> ModelConfig:
    return config_from_dict({**RAW, **changes}, {})


def as_family(name: str, **changes: Any) -> ModelConfig:
    return config(architectures=[f"{name}ForCausalLM"], model_type=name.lower(), **changes)


def test_plain_values() -> None:
    got = config()
    assert got == ModelConfig(
        family=Family.LLAMA,
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        context_length=512,
        rms_norm_eps=1e-5,
        rope=Rope(10000.0),
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        eos_token_ids=(2,),
        bos_token_id=None,
    )
    assert (got.q_size, got.kv_size) == (64, 32)


def test_what_a_family_implies() -> None:
    assert as_family("Qwen2").attention_bias
    assert not as_family("Qwen2").output_bias
    assert as_family("Qwen3").qk_norm
    assert as_family("Qwen3").head_dim == 128
    assert as_family("Qwen3", head_dim=32).head_dim == 32
    llama = config(attention_bias=True)
    assert llama.attention_bias
    assert llama.output_bias
    assert not as_family("Mistral", attention_bias=True).attention_bias


def test_missing_kv_heads_mean_no_grouping() -> None:
    raw = {name: value for name, value in RAW.items() if name != "num_key_value_heads"}
    assert config_from_dict(raw, {}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), ([2, 5], 7, (2, 5, 7)), (2, [2, 9], (2, 9)), (None, 4, (4,)), (None, None, ())],
)
def test_eos_ids_are_the_union_of_both_files(in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    got = config_from_dict({**RAW, "eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert got.eos_token_ids == expected


def test_a_window_limits_the_context() -> None:
    window = as_family("Mistral", sliding_window=128)
    assert (window.context_length, window.sliding_window) == (128, 128)
    assert as_family("Mistral", sliding_window=4096).context_length == 512
    assert as_family("Mistral", sliding_window=None, max_position_embeddings=9000).context_length == 9000
    # Hugging Face gives a Mistral model without the key a window of 4096.
    assert as_family("Mistral", max_position_embeddings=9000).context_length == 4096
    assert as_family("Qwen2", sliding_window=128).context_length == 512
    assert as_family("Qwen2", sliding_window=128, use_sliding_window=True).context_length == 128


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(1e4, LinearScaling(2.0))),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(1e4, Llama3Scaling(8.0, 1.0, 4.0, 64))),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
            Rope(1e6, YarnScaling(4.0, 128, 32.0, 1.0, pytest.approx(1.1386294), True)),
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 0.5, "beta_fast": 8, "truncate": False}},
            Rope(1e4, YarnScaling(4.0, 128, 8.0, 1.0, 0.5, False)),
        ),
    ],
)
def test_rope_of_old_and_new_files(changes: dict[str, Any], expected: Rope) -> None:
    assert config(**changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type.*dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor.*None"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor.*-1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers.*two"),
        ({"num_hidden_layers": 0}, "num_layers.*0"),
        ({"num_key_value_heads": 3}, "num_kv_heads.*4 heads.*3"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window.*0"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        config(**changes)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert read_config(tmp_path) == config()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert read_config(tmp_path).eos_token_ids == (2, 3)


@pytest.mark.parametrize("end", ["<end>", {"__type": "AddedToken", "content": "<end>"}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_the_tokenizers_end_is_one(tmp_path: Path, file: str, end: Any) -> None:
    """CASES I63: of a model trained to chat, whose config is that of its base."""
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "eos_token_id": 1}))
    added = {"5": {"content": "<other>"}, "7": {"content": "<end>"}}
    settings = {"eos_token": end, **({"added_tokens_decoder": added} if file == "tokenizer_config.json" else {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file == "tokenizer.json":
        tokens = [{"id": int(token_id), **entry} for token_id, entry in added.items()]
        (tmp_path / file).write_text(json.dumps({"added_tokens": tokens}))
    assert read_config(tmp_path).eos_token_ids == (1, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert read_config(tmp_path).eos_token_ids == (1, 7, 3)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert read_config(tmp_path).eos_token_ids == (1, 7, 3)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    assert read_config(tmp_path).eos_token_ids == (1, 7, 3)


@pytest.mark.parametrize(("content", "says"), [(None, "cannot read"), ("{", "not JSON"), ("[]", "no JSON object")])
def test_unreadable_files(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequestError, match=says):
        read_config(tmp_path)
