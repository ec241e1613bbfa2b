"""How much memory this process holds, as the system and torch see it."""

import os
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Main memory of this process; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def device_bytes() -> int:
    """GPU memory that torch holds for this process on all GPUs; 0 before CUDA was used, and without it."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
