"""Marks in the work of a GPU's stream that other threads and streams can wait for."""

import torch
from torch import Tensor


def mark_stream(device: torch.device, *, timed: bool = False, sleeps: bool = False) -> torch.cuda.Event:
    """An event behind everything that the calling thread has put on its current stream of a GPU.

    Args:
        timed: the time between two such events can be asked for.
        sleeps: who synchronizes with it uses no processor meanwhile, so that a hung GPU does not look like work.
    """
    event = torch.cuda.Event(enable_timing=timed, blocking=sleeps)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the GPU has got as far as the event; asks without waiting."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def send_to_host(values: Tensor, *, sleeps: bool = False) -> tuple[Tensor, torch.cuda.Event]:
    """Values of a GPU on their way into pinned memory, behind what the current stream has been given, which may
    overwrite them afterwards; and the event behind which they are there.

    Args:
        sleeps: see `mark_stream`.
    """
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    return on_host, mark_stream(values.device, sleeps=sleeps)
