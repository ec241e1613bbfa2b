"""Memory of a pool that other processes may write to: one allocation of its own.

On CUDA other processes open the driver's allocation, not the tensor. In one that the caching allocator shares out, they
would see (and keep alive) whatever else lies there; and what it maps piece by piece cannot be opened at all.
"""

import os
from collections.abc import Sequence

import torch

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class PoolMemory:
    """A zeroed tensor in an allocation of its own.

    Attributes:
        data: the tensor; on CUDA it starts at the first byte of its allocation.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        if device.type != "cuda":
            self.data = torch.zeros(*shape, dtype=dtype, device=device)
            return
        with torch.cuda.device(device):
            segment = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(segment):
                self.data = torch.zeros(*shape, dtype=dtype, device=device)
        self._segment = segment  # behind the tensor, so that it is let go of after it


def shares_gpu_memory() -> bool:
    """Whether allocations of this process can be opened by others: those of expandable segments cannot."""
    settings = " ".join(os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS)
    return "expandable_segments:true" not in settings.lower().replace(" ", "")
