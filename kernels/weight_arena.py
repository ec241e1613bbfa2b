"""Memory for packed weights that lies together, on huge pages where the system grants them.

A forward reads every weight once; with 4 KiB pages a good part of that time goes into address translation.
"""

import torch
from torch import Tensor

from graftline.kernels.native_library import native_library

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20  # what is not used of the last chunk is never touched, so it costs address space only
_ALIGNMENT_BYTES = 64


class WeightArena:
    """Gives out tensors of one model, one after the other; the memory lives as long as any of them.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self._used + num_bytes > self._chunk.shape[0]:
            self._chunk = _chunk(max(num_bytes, _CHUNK_BYTES))
            self._used = 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return piece.view(dtype).view(shape)


def _chunk(num_bytes: int) -> Tensor:
    """Fresh bytes that start at a huge page."""
    data = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    library = native_library()
    if library is not None:
        library.gl_advise_huge_pages(data.data_ptr(), data.nbytes)
    skipped = -data.data_ptr() % _HUGE_PAGE_BYTES
    return data[skipped : skipped + num_bytes]
