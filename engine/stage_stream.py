"""The CUDA stream on which a stage computes.

It is not the default one: the transfer engine copies on that, or on streams that wait for it, so that pages which are
complete would go out behind whatever the stage was given meanwhile, such as the next prompt's chunk.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

_URGENT, _USUAL = -1, 0  # as CUDA counts priorities


class StageStream:
    """A stage's own stream on a GPU, which waits for no other; nothing on a CPU.

    Args:
        urgent: its kernels go first where several of a process's streams have some ready: prompts before rounds, which
            would take all multiprocessors for milliseconds between any two kernels of a prompt.

    Attributes:
        device: where the stage computes.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_URGENT if urgent else _USUAL)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        """Makes the stream, and its GPU, the calling thread's current ones while the block is open."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
