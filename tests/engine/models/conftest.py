"""Tiny models saved by transformers, which is the oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}

SaveTiny = Callable[..., tuple[Path, Any]]


@pytest.fixture
def save_tiny(tmp_path: Path) -> SaveTiny:
    """Saves a model of a transformers config class; returns its directory and the model itself, float32."""

    def save(kind: str, **overrides: Any) -> tuple[Path, Any]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **overrides})
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        path = tmp_path / kind.lower()
        model.save_pretrained(path)
        return path, model

    return save
