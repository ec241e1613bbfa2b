"""Marks in the work of a GPU's stream that other threads and streams can wait for."""

import torch


def mark_stream(device: torch.device, *, timed: bool = False) -> torch.cuda.Event:
    """An event behind everything that the calling thread has put on its current stream of a GPU.

    Args:
        timed: the time between two such events can be asked for.
    """
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the GPU has got as far as the event; asks without waiting."""
    return bool(event.query())  # type: ignore[no-untyped-call]
