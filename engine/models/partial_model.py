"""What models of every family have around their layers: the embedding, the final norm and the output head."""

from torch import Tensor

from graftline.engine.models.weight_loader import WeightLoader
from graftline.kernels.linear import LinearWeight, linear_wide, unpack_rows
from graftline.kernels.norm import rms_norm


class PartialModel:
    """All of a `TargetModel` but its layers' forward, which is the family's own.

    Args:
        loader: where weights come from.
        layers: contiguous global layer ids; may be empty.
        with_embedding: hold the token embedding (the first stage, and the last when its drafter needs it).
        with_head: hold the final norm and the output head. A tied head and embedding are one matrix.

    Raises:
        InvalidRequestError: the checkpoint lacks a tensor, or one is not shaped as the config says.
        ValueError: layers that the model does not have.
    """

    def __init__(self, loader: WeightLoader, layers: range, *, with_embedding: bool, with_head: bool) -> None:
        config = loader.config
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
            raise ValueError(f"{layers} of a model with {config.num_layers} layers")
        self.config = config
        self.layers = layers
        self.dtype = loader.dtype
        self.device = loader.device
        self._embedding, self._head = loader.ends(with_embedding, with_head)
        self._norm = loader.norm("model.norm", config.hidden_size) if with_head else None

    @property
    def embedding(self) -> LinearWeight | None:
        """See `TargetModel`."""
        return self._embedding

    @property
    def head(self) -> LinearWeight | None:
        """See `TargetModel`."""
        return self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        assert self._embedding is not None, "this stage was loaded without the embedding"
        return unpack_rows(self._embedding, token_ids)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `TargetModel`."""
        assert self._norm is not None, "this stage was loaded without the head"
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """See `TargetModel`."""
        assert self._head is not None, "this stage was loaded without the head"
        return linear_wide(normed, self._head)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        assert self._head is not None, "this stage was loaded without the head"
        return unpack_rows(self._head, token_ids)
