"""Recurrent state of one stage: one allocation, slot-major, so that a request's state is one contiguous copy.

`[num_slots + 1][linear layers of the stage][conv window, recurrent state]`. The last slot is padding: rows that stand
for nobody may write there. Windows are of the model's type, recurrent states float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.pool_memory import PoolMemory
from graftline.kernels.state_commit import typed_view

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """What one slot holds.

    Attributes:
        layers: global ids of the stage's linear layers, ascending.
        dtype: of the conv windows.
    """

    layers: tuple[int, ...]
    shape: LinearShape
    dtype: torch.dtype

    @property
    def window_bytes(self) -> int:
        """One layer's conv window, padded so that what follows is aligned."""
        return _aligned(self.shape.window_elements * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """One layer's recurrent state."""
        return _aligned(self.shape.state_elements * torch.float32.itemsize)

    @property
    def slot_bytes(self) -> int:
        """All layers of one slot."""
        return len(self.layers) * (self.window_bytes + self.state_bytes)

    def window_offset(self, layer: int) -> int:
        """Bytes before a global layer's window within a slot."""
        return self.layers.index(layer) * (self.window_bytes + self.state_bytes)

    def state_offset(self, layer: int) -> int:
        """Bytes before its recurrent state."""
        return self.window_offset(layer) + self.window_bytes

    def windows(self, data: Tensor, layer: int) -> Tensor:
        """[..., conv_width - 1, channels] of a layer in [..., slot_bytes] uint8."""
        return typed_view(
            data, self.window_offset(layer), self.dtype, (self.shape.conv_width - 1, self.shape.conv_channels)
        )

    def states(self, data: Tensor, layer: int) -> Tensor:
        """[..., value_heads, key_dim, value_dim] float32 of a layer in [..., slot_bytes] uint8."""
        shape = self.shape
        dims = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        return typed_view(data, self.state_offset(layer), torch.float32, dims)


class StatePool:
    """The states of a stage's requests.

    Attributes:
        data: [num_slots + 1, slot_bytes] uint8.
    """

    def __init__(self, geometry: StateGeometry, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.geometry = geometry
        self.num_slots = num_slots
        memory = PoolMemory((num_slots + 1, geometry.slot_bytes), torch.uint8, torch.device(device))
        self.data = memory.data
        self._memory = memory
        self._windows = {layer: geometry.windows(self.data, layer) for layer in geometry.layers}
        self._states = {layer: geometry.states(self.data, layer) for layer in geometry.layers}

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, padding included."""
        return self.data.numel()

    def windows(self, layer: int) -> Tensor:
        """[slots + 1, conv_width - 1, channels] of a global layer."""
        return self._windows[layer]

    def states(self, layer: int) -> Tensor:
        """[slots + 1, value_heads, key_dim, value_dim] float32."""
        return self._states[layer]

    def clear(self, slots: Sequence[int]) -> None:
        """These slots start from nothing."""
        for slot in slots:
            self.data[slot].zero_()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
