"""Lists of the host onto a device, in copies that the host does not wait for.

The source is pinned memory of torch's caching allocator, which gives it to nobody else until the copy is done.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED_INTS = 4


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list, or a list of equally long lists, as a tensor on a device."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def upload_into(into: Tensor, values: Sequence[object]) -> None:
    """A list, or a list of equally long lists, into a tensor that is there already."""
    into.copy_(torch.tensor(values, dtype=into.dtype, pin_memory=into.is_cuda), non_blocking=True)


class RecurringUploads:
    """Lists of ints that come again and again, such as the slots of a round, as int64 vectors that are uploaded once.

    For one thread: what uses them is put on the stream on which they were uploaded.

    Args:
        most: lists that are kept; beyond it all are forgotten.
    """

    def __init__(self, device: torch.device, most: int = 64) -> None:
        self._device = device
        self._most = most
        self._known: dict[tuple[int, ...], Tensor] = {}

    def of(self, values: Sequence[int]) -> Tensor:
        """A list as a vector, which is not to be written to."""
        key = tuple(values)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self._most:
                self._known.clear()
            known = self._known[key] = upload(key, torch.int64, self._device)
        return known


def pad_rows(rows: Sequence[Sequence[int]], filler: int = 0) -> list[list[int]]:
    """Lists made as long as the longest of them."""
    widest = max(map(len, rows), default=0)
    return [[*row, *[filler] * (widest - len(row))] for row in rows]


def int_starts(lengths: Iterable[int]) -> list[int]:
    """Where int32 vectors of these lengths begin in one buffer, and the end of the last one.

    Every vector starts at 16 bytes, so that Triton's kernels see the same alignment whatever the lengths.
    """
    return [0, *accumulate(-(-length // _ALIGNED_INTS) * _ALIGNED_INTS for length in lengths)]


def upload_ints(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists as int32 vectors on a device, all in one copy, each where `int_starts` says."""
    starts = int_starts(map(len, lists))
    on_host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, values in zip(starts, lists, strict=False):
        on_host[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
    there = on_host.to(device, non_blocking=True)
    return [there[start : start + len(values)] for start, values in zip(starts, lists, strict=False)]
