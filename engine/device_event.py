"""Marks in the work of a GPU's stream that other threads and streams can wait for."""

import torch


def mark_stream(device: torch.device) -> torch.cuda.Event:
    """An event behind everything that the calling thread has put on its current stream of a GPU."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
