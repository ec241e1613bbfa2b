"""The CUDA stream on which a process's stages compute.

It is not the default one: the transfer engine copies on that, or on streams that wait for it, so that pages which are
complete would go out behind whatever the stage was given meanwhile, such as the next prompt's chunk.

Stages that are threads of one device share one, whatever worker they belong to: with a stream each, captured rounds of
two stages gave wrong tokens on an H200. All graphs of a process are captured on one stream of torch's, and libraries
give a stream a workspace: it is presumed that graphs which run side by side write into the same.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


def on_stage_stream(device: torch.device) -> AbstractContextManager[object]:
    """Makes this process's stream on a GPU, and the GPU, the calling thread's current ones while the block is open;
    nothing on a CPU.
    """
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One that waits for no other."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
