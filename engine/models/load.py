"""The model class of a checkpoint."""

import torch

from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.qwen3_next import Qwen3NextModel
from graftline.engine.models.target_model import TargetModel
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention


def load_model(
    checkpoint: Checkpoint,
    layers: range,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    with_embedding: bool = True,
    with_head: bool = True,
    attention: Attention = paged_attention,
    may_reside: bool = True,
) -> TargetModel:
    """Loads layers of a model of any family; see `DenseModel` for arguments and errors."""
    if checkpoint.config.hybrid is not None:
        return Qwen3NextModel(
            checkpoint, layers, dtype, device, with_embedding=with_embedding, with_head=with_head, attention=attention
        )
    return DenseModel(
        checkpoint,
        layers,
        dtype,
        device,
        with_embedding=with_embedding,
        with_head=with_head,
        attention=attention,
        may_reside=may_reside,
    )
