"""Configs of draft heads: our own round trip, public ones, and wrong ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind, read_draft_head_config
from graftline.errors import InvalidRequestError

OURS = DraftHeadConfig(
    kind=DraftHeadKind.EAGLE3,
    hidden_size=64,
    target_hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    draft_vocab_size=128,
    feature_layers=(1, 2, 3),
    target_model="tiny",
    target_sha256="ab" * 32,
)
PUBLIC_EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 28], "use_aux_hidden_state": True},
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
PUBLIC_EAGLE = {
    "architectures": ["LlamaForCausalLMEagle"],
    "bias": True,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "vocab_size": 32000,
}


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_own_config_reads_back_equal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(OURS.to_json())
    assert read_draft_head_config(tmp_path) == OURS
    assert read_draft_head_config(tmp_path / "config.json") == OURS


def test_public_eagle3_config(tmp_path: Path) -> None:
    config = read_draft_head_config(write(tmp_path, PUBLIC_EAGLE3))
    assert config.kind is DraftHeadKind.EAGLE3
    assert config.feature_layers == (2, 18, 29)
    assert (config.draft_vocab_size, config.vocab_size, config.reduced_vocab) == (32000, 128256, True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.norm_output
    assert config.input_norm


def test_public_eagle3_without_layers_uses_low_middle_high(tmp_path: Path) -> None:
    raw = {key: value for key, value in PUBLIC_EAGLE3.items() if key != "eagle_config"}
    assert read_draft_head_config(write(tmp_path, raw)).features_of(32) == (2, 16, 29)


def test_public_eagle_config(tmp_path: Path) -> None:
    config = read_draft_head_config(write(tmp_path, PUBLIC_EAGLE))
    assert config.kind is DraftHeadKind.EAGLE
    assert config.features_of(32) == (-1,)
    assert not config.reduced_vocab
    assert config.num_kv_heads == 32
    assert not config.norm_output
    assert not config.input_norm


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("num_kv_heads", 3),
        ("head_dim", 15),
        ("draft_vocab_size", 513),
        ("feature_layers", (-2,)),
    ],
)
def test_contradicting_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        replace(OURS, **{field: value})


def test_eagle_reads_only_the_last_hidden_state() -> None:
    with pytest.raises(InvalidRequestError, match="feature_layers"):
        replace(OURS, kind=DraftHeadKind.EAGLE)


def test_feature_layer_beyond_the_target() -> None:
    with pytest.raises(InvalidRequestError, match="feature_layers"):
        OURS.features_of(2)


@pytest.mark.parametrize(
    "raw", [[], {}, {"kind": "medusa"}, {**PUBLIC_EAGLE3, "num_hidden_layers": 2}, {"kind": "eagle3", "x": 1}]
)
def test_wrong_config_is_refused(tmp_path: Path, raw: object) -> None:
    with pytest.raises(InvalidRequestError):
        read_draft_head_config(write(tmp_path, raw))


def test_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_draft_head_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_draft_head_config(tmp_path)
