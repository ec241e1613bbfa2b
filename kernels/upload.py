"""Lists of the host onto a device, in copies that the host does not wait for.

The source is pinned memory of torch's caching allocator, which gives it to nobody else until the copy is done.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED_INTS = 4


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list, or a list of equally long lists, as a tensor on a device."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def upload_ints(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists as int32 vectors on a device, all in one copy.

    Every vector starts at 16 bytes, so that Triton's kernels see the same alignment whatever the lengths.
    """
    starts = [0, *accumulate(-(-len(values) // _ALIGNED_INTS) * _ALIGNED_INTS for values in lists)]
    on_host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, values in zip(starts, lists, strict=False):
        on_host[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
    there = on_host.to(device, non_blocking=True)
    return [there[start : start + len(values)] for start, values in zip(starts, lists, strict=False)]
