"""Models that measurements on a GPU need and no disk holds: Llama-3.1-8B's shapes, and a draft head for them.

The head's acceptance is stated, not learned: the model's next token is a permutation of its last one, and the head
knows it for a chosen share of the ids. Its shapes are those of an EAGLE head with a draft vocabulary of 32000.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graftline.engine.draft_head.config import CONFIG_FILE, FINAL_NORM, WEIGHTS_FILE, DraftHeadConfig, DraftHeadKind
from graftline.engine.models.config import read_config
from graftline.engine.models.dummy_checkpoint import DUMMY_FILE, DummyCheckpoint, DummyWeights
from graftline.engine.models.random import write_tiny_card

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128255,
}
"""As published, but for the context: tables of rotations for 131072 positions would be of no use here."""

DRAFT_VOCAB = 32000


def write_dummy_model(path: Path, config: Mapping[str, Any], weights: DummyWeights | None = None) -> Path:
    """A directory that `open_checkpoint` reads as a model of that config with random weights; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    (path / DUMMY_FILE).write_text(json.dumps(_plain(weights or DummyWeights())), encoding="utf-8")
    write_tiny_card(path, int(config["vocab_size"]))
    return path


def _plain(weights: DummyWeights) -> dict[str, int]:
    return {"seed": weights.seed, "successors": weights.successors}


def write_knowing_head(path: Path, model: Path, share: float, draft_vocab: int = DRAFT_VOCAB, seed: int = 7) -> Path:
    """A draft head for a model of `write_dummy_model` with `successors` equal to `draft_vocab`; returns `path`.

    Args:
        share: of the draft vocabulary's ids after which the right token is drafted; the others draft a wrong one.
    """
    target = DummyCheckpoint(model)
    config = read_config(model)
    head_config = DraftHeadConfig(
        kind=DraftHeadKind.EAGLE,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab,
        feature_layers=(FINAL_NORM,),
        context_length=config.context_length,
        norm_output=False,
        input_norm=False,
    )
    hidden, device = config.hidden_size, target.tensor("model.norm.weight").device
    rows = target.tensor("lm_head.weight")[:draft_vocab]
    unknown = torch.randperm(draft_vocab, generator=torch.Generator().manual_seed(seed))
    unknown = unknown[: round((1 - share) * draft_vocab)].to(device)
    rows[unknown] = rows[unknown.roll(1)]  # each says what another one should
    tensors: dict[str, Tensor] = {
        "fc.weight": torch.cat((torch.eye(hidden, device=device), torch.zeros(hidden, hidden, device=device)), dim=1),
        "lm_head.weight": rows,
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden, device=device),
    }
    prefix = "model.layers.0"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
        tensors[f"layers.0.{name}.weight"] = target.tensor(f"{prefix}.{name}.weight")
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] = target.tensor(f"{prefix}.{name}.weight")
    if draft_vocab != config.vocab_size:
        tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64, device=device)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(head_config.to_json(), encoding="utf-8")
    on_host = {name: _stored(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path / WEIGHTS_FILE)
    return path


def _stored(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int64 else tensor.to(torch.bfloat16)


def write_successor_pair(path: Path, share: float, config: Mapping[str, Any] = LLAMA_8B) -> tuple[Path, Path]:
    """A model whose tokens follow a permutation, and a head that knows `share` of it; returns their directories."""
    count = min(DRAFT_VOCAB, int(config["vocab_size"]))
    model = write_dummy_model(path / "model", config, DummyWeights(successors=count))
    return model, write_knowing_head(path / "head", model, share, count)
