"""Writes tiny draft heads for tests and trials: random ones, and ones whose drafts are known beforehand.

The known ones go with a target from `write_tiny_model` whose layers add nothing (`silence_layers`): its next token
depends on the current token alone, and a head that reads nothing but the embedding can say the same, the opposite,
or one fixed token for ever.
"""

import math
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftline.engine.draft_head.config import (
    CONFIG_FILE,
    FINAL_NORM,
    WEIGHTS_FILE,
    DraftHeadConfig,
    DraftHeadKind,
)
from graftline.engine.models.config import read_config


class Drafts(Enum):
    """What a written head drafts."""

    RANDOM = "random"
    AGREE = "agree"
    DISAGREE = "disagree"


def silence_layers(model: Path) -> None:
    """Zeroes what every layer of a written model adds to the residual stream."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, file)


def write_tiny_head(
    path: Path,
    target: Path,
    *,
    kind: DraftHeadKind = DraftHeadKind.EAGLE,
    drafts: Drafts = Drafts.RANDOM,
    feature_layers: tuple[int, ...] = (1, 2, 3),
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate: int = 96,
    draft_vocab: int | None = None,
    context: int | None = None,
    seed: int = 1,
) -> Path:
    """Writes a head for a Hugging Face directory with safetensors and returns `path`.

    Args:
        feature_layers: of an EAGLE-3 head; an EAGLE head reads the final-normed hidden state.
        draft_vocab: size of an EAGLE-3 head's reduced vocabulary, every n-th target id; None keeps all.
        context: positions the head says it was made for; the target's by default.
    """
    model = read_config(target)
    is_eagle3 = kind is DraftHeadKind.EAGLE3
    hidden = model.hidden_size
    vocab = draft_vocab or model.vocab_size
    config = DraftHeadConfig(
        kind=kind,
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden // num_heads,
        vocab_size=model.vocab_size,
        draft_vocab_size=vocab,
        feature_layers=feature_layers if is_eagle3 else (FINAL_NORM,),
        context_length=context or model.context_length,
        norm_output=is_eagle3,
        input_norm=is_eagle3,
    )
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    prefix = "midlayer" if is_eagle3 else "layers.0"
    inputs = (2 if is_eagle3 else 1) * hidden
    q_size, kv_size = num_heads * config.head_dim, num_kv_heads * config.head_dim
    tensors = {
        "fc.weight": drawn(hidden, (len(feature_layers) if is_eagle3 else 2) * hidden),
        f"{prefix}.self_attn.q_proj.weight": drawn(q_size, inputs),
        f"{prefix}.self_attn.k_proj.weight": drawn(kv_size, inputs),
        f"{prefix}.self_attn.v_proj.weight": drawn(kv_size, inputs),
        f"{prefix}.self_attn.o_proj.weight": drawn(hidden, q_size),
        f"{prefix}.mlp.gate_proj.weight": drawn(intermediate, hidden),
        f"{prefix}.mlp.up_proj.weight": drawn(intermediate, hidden),
        f"{prefix}.mlp.down_proj.weight": drawn(hidden, intermediate),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
    }
    if is_eagle3:
        tensors |= {
            name: torch.ones(hidden)
            for name in ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
        }
    if vocab != model.vocab_size:
        stride = model.vocab_size // vocab
        tensors["d2t"] = torch.arange(vocab) * stride - torch.arange(vocab)
    if drafts is not Drafts.RANDOM:
        trained = load_file(target / "model.safetensors")
        tensors |= _known(tensors, hidden, trained["lm_head.weight"] * trained["model.norm.weight"], drafts)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(config.to_json())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS_FILE)
    return path


def _known(tensors: dict[str, Tensor], hidden: int, head: Tensor, drafts: Drafts) -> dict[str, Tensor]:
    """An EAGLE head that passes the embedding through, and an output head that says what is wanted.

    `head` has the target's final norm folded in, whose scale moves no argmax.
    """
    through = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    silent = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    return silent | {"fc.weight": through, "lm_head.weight": head if drafts is Drafts.AGREE else -head}
