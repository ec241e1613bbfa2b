"""How tensors of a checkpoint become the weights of a model, as far as every family does it alike."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from graftline.engine.models.checkpoint import Checkpoint
from graftline.errors import InvalidRequestError
from graftline.kernels.linear import LinearWeight


class WeightLoader(ABC):
    """Tensors of a checkpoint, checked against its config, converted and on their device.

    Args:
        dtype: float32 or bfloat16; what matrices are stored in.

    Attributes:
        activation_dtype: what norms and biases are stored in, and activations are of: float32 on CPU, else `dtype`.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = torch.device(device)
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self._checkpoint = checkpoint

    @abstractmethod
    def norm(self, module: str, size: int) -> Tensor:
        """The scale that a norm multiplies by, [size]."""

    @abstractmethod
    def matrix(self, module: str, rows: int, columns: int) -> LinearWeight:
        """One packed matrix, columns -> rows."""

    def ends(self, with_embedding: bool, with_head: bool) -> tuple[LinearWeight | None, LinearWeight | None]:
        """Embedding and output head where asked for, one object when they are tied."""
        config = self.config
        vocabulary = config.vocab_size, config.hidden_size
        embedding = None
        if with_embedding or (with_head and config.tie_embeddings):
            embedding = self.matrix("model.embed_tokens", *vocabulary)
        head = (embedding if config.tie_embeddings else self.matrix("lm_head", *vocabulary)) if with_head else None
        return (embedding if with_embedding else None), head

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A parameter as the checkpoint holds it; read-only.

        Raises:
            InvalidRequestError: the checkpoint lacks it, or it is not of that shape.
        """
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != shape:
            raise InvalidRequestError("model", f"tensor {name} is {tuple(tensor.shape)}, the config says {shape}")
        return tensor
