"""Work of fixed shape, captured in CUDA graphs that share one memory pool."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_WARM_UPS = 2
# A process captures one graph at a time.
_LOCK = threading.Lock()


def sizes_up_to(most: int, least: int = 1) -> tuple[int, ...]:
    """Sizes to which work is padded: `least`, doubled again and again, and `most` if that is more."""
    sizes = [least]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return (*sizes, most) if most > least else (least,)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work that reads and writes the same memory whenever it is replayed.

    Attributes:
        num_bytes: device memory that its capture took on top of what the pool had.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    num_bytes: int

    def replay(self) -> Tensor:
        """Launches the work on the current stream; what it returned before is overwritten."""
        self.graph.replay()
        return self.output


@dataclass(frozen=True, slots=True)
class FixedWork:
    """Work that reads and writes the same memory whenever it is launched, captured or not.

    Attributes:
        run: launches it op by op.
    """

    run: Callable[[], Tensor]
    graph: CapturedGraph | None

    @property
    def num_bytes(self) -> int:
        """See `CapturedGraph`."""
        return 0 if self.graph is None else self.graph.num_bytes

    def launch(self) -> Tensor:
        """Launches the work on the current stream; what it returned before may be overwritten."""
        return self.run() if self.graph is None else self.graph.replay()


class GraphPool:
    """Graphs replayed one after the other, on one stream.

    Args:
        captures: False to warm up only; so it is on devices other than CUDA.
    """

    def __init__(self, device: torch.device, *, captures: bool = True) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle() if captures and device.type == "cuda" else None

    def capture(self, run: Callable[[], Tensor], *, wanted: bool = True) -> CapturedGraph | None:
        """Warms work up, so that everything it needs is compiled and allocated, then captures it.

        Args:
            wanted: False for work that is too large to be worth a graph.

        Returns:
            None where nothing is captured.
        """
        with _LOCK:
            for _ in range(_WARM_UPS):
                run()
            if self._memory is None or not wanted:
                return None
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # a capture begins with it: it would seem to give memory back
            before = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            with (
                without_collection(),
                torch.cuda.graph(graph, self._memory, _capturing_stream(self._device), "thread_local"),
            ):
                output = run()
            return CapturedGraph(graph, output, torch.cuda.memory_reserved(self._device) - before)

    def fix(self, run: Callable[[], Tensor]) -> FixedWork:
        """Captures work where that is done here; see `capture`."""
        return FixedWork(run, self.capture(run))


def _capturing_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream, or None for torch's own, which a capture needs instead of the default one.

    Libraries give every stream a workspace, which graphs that were captured there write into: graphs that are replayed
    side by side, on the streams of two stages, must not have been captured on one.
    """
    stream = torch.cuda.current_stream(device)
    return None if stream == torch.cuda.default_stream(device) else stream


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected while the block is open: an old graph that goes calls the driver, which a capture
    forbids, and a destructor that fails ends the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
