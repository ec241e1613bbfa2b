"""Decode steps of one batch of rows; on a GPU each position's step is captured once and replayed for later batches."""

import torch
from torch import Tensor

from graftline.engine.draft_head.target import StaticCache, TargetRunner, varying_lengths
from graftline.engine.graph_capture import without_collection


class StepGraphs:
    """Owns the static cache of `num_rows` rows of up to `length` tokens, and the captured steps over it."""

    def __init__(self, runner: TargetRunner, num_rows: int, length: int, *, captured: bool) -> None:
        target = runner.target
        self.num_rows, self.length = num_rows, length
        self.cache = StaticCache(target, num_rows, length)
        self._runner = runner
        self._captured = captured and target.device.type == "cuda"
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=target.device)
        self._hidden = torch.empty(num_rows, target.shape.hidden_size, dtype=target.embed.dtype, device=target.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captured else None

    def fill(self, tokens: Tensor, rows: slice) -> Tensor:
        """As `TargetRunner.fill`."""
        with varying_lengths():
            return self._runner.fill(tokens, self.cache, rows)

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """As `TargetRunner.step`; the result is overwritten by the next call."""
        self._tokens.copy_(tokens)
        if not self._captured:
            return self._run(position)
        graph = self._graphs.get(position)
        if graph is None:
            graph = self._graphs[position] = self._capture(position)
        graph.replay()
        return self._hidden

    def _run(self, position: int) -> Tensor:
        with varying_lengths():
            return self._hidden.copy_(self._runner.step(self._tokens, position, self.cache))

    def _capture(self, position: int) -> torch.cuda.CUDAGraph:
        if not self._graphs:
            self._run(position)  # compiles and warms up; captures may not
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph, pool=self._pool):
            self._run(position)
        return graph
