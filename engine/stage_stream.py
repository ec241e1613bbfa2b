"""The CUDA stream of a stage.

A stage does not compute on the default stream: the transfer engine copies on that one, or on streams that wait for it,
so that pages which are complete would go out behind whatever the stage was given meanwhile, such as the next prompt's
chunk. Two stages of one process would wait for each other in the same way.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


def stage_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own for a stage on a GPU, which waits for no other; None elsewhere."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Makes a stream and its GPU the calling thread's current ones while the block is open; nothing without one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
