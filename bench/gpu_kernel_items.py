"""What the GPU kernel measurement is made of: named items, and helpers that checks and timings share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from graftline.kernels.tree_batch import TreeBatch
from graftline.kernels.tree_walk import tree_rows

L2_BYTES = 60 << 20  # an H200 has 50 MiB: timings walk through more than this


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to run on the device.

    Attributes:
        name: unique.
        run: takes whether only to warm up (compile, run once); gives what is to be written down.
    """

    name: str
    run: Callable[[bool], dict[str, Any]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values, drawn on the device."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device()).to(dtype)


def device() -> torch.device:
    """Where everything runs; the CPU only in tests, whose figures are of no interest."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills `torch.empty` with NaN or large integers, so that an element nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph, warmed up; on CPU the call itself."""
    if device().type == "cpu":
        return lambda: (run(), None)[1]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds_each(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds of one of these calls, captured one after the other in a graph that is replayed."""

    def all_calls() -> None:
        for call in calls:
            call()

    replay = captured(all_calls)
    if device().type == "cpu":
        return 1.0
    replay()
    found: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return median(found)


def tree_round(
    starts: Sequence[int], parents: Sequence[Sequence[int]], rows_each: int, page_size: int, max_slots: int
) -> tuple[TreeBatch, int]:
    """A round of these trees (no parents: padding) and the pages of its pool, shuffled."""
    where = device()
    links = torch.zeros(len(starts), rows_each, dtype=torch.int64, device=where)
    for index, tree in enumerate(parents):
        links[index, : len(tree)] = torch.tensor(tree, dtype=torch.int64)
    count = torch.tensor([len(tree) for tree in parents], device=where)
    depths, visible = tree_rows(links, count)
    pages_each = -(-max_slots // page_size)
    pages = torch.randperm(len(starts) * pages_each, generator=torch.Generator().manual_seed(1))
    tables = pages.to(torch.int32).view(len(starts), pages_each).to(where)
    begins = torch.tensor(list(starts), dtype=torch.int32, device=where)
    slots = begins.long().unsqueeze(1) + torch.arange(rows_each, device=where)
    flat = tables.long().gather(1, slots // page_size) * page_size + slots % page_size
    is_real = torch.arange(rows_each, device=where) < count.unsqueeze(1)
    batch = TreeBatch(
        positions=(begins.unsqueeze(1) + depths).flatten(),
        row_slots=torch.where(is_real, flat, -1).flatten(),
        visible=visible.flatten(),
        starts=begins,
        page_tables=tables,
        rows_each=rows_each,
        num_tail=rows_each,
        page_size=page_size,
    )
    return batch, pages.numel()
