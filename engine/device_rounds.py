"""Decode rounds of fixed shape: compact, verify, walk, extend and grow without a value read on the host.

A round of n requests is padded to one of a few sizes and has V rows a request, whatever their trees are, so that on
CUDA it is captured once and replayed. What a round leaves (tree, committed length, accepted nodes) stays in
`RoundState`, from where the next one takes it: that one can be launched before the host has read this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftline.engine.device_growth import DeviceGrowth
from graftline.engine.draft_module import DraftModule
from graftline.engine.graph_capture import CapturedGraph, GraphPool
from graftline.engine.kv_pool import KvPool
from graftline.engine.models.target_model import TargetModel
from graftline.engine.plan import StepPlan
from graftline.engine.round_state import RoundRows, RoundState
from graftline.kernels.kv_compact import compact_kv
from graftline.kernels.sample import sample
from graftline.kernels.tree_batch import TreeBatch
from graftline.kernels.tree_walk import tree_rows, walk_trees

_FOLLOW_TIMEOUT_S = 60.0


def round_sizes(max_running: int) -> tuple[int, ...]:
    """Sequences of the rounds that there are: powers of two, and the most there can be."""
    sizes = [1]
    while sizes[-1] * 2 < max_running:
        sizes.append(sizes[-1] * 2)
    return (*sizes, max_running) if max_running > 1 else (1,)


def round_size(count: int, max_running: int) -> int:
    """The smallest size that holds `count` sequences."""
    return next(size for size in round_sizes(max_running) if size >= count)


@dataclass(frozen=True, slots=True)
class RoundDrafter:
    """The drafter's part of a round."""

    layer: DraftModule
    pool: KvPool
    growth: DeviceGrowth


class DeviceRounds:
    """One stage's part of the rounds.

    Args:
        capture: features that this stage must take; see `Stage`.
        is_last: the stage samples and walks.
        drafter: the last stage's; None without speculation.
        graphs: capture rounds of up to `max_graph_batch` sequences, on CUDA.
        shares_state: all stages work on one state: the first one tells it what the host knows.
    """

    def __init__(
        self,
        model: TargetModel,
        pool: KvPool,
        state: RoundState,
        *,
        is_first: bool,
        is_last: bool,
        capture: Sequence[int],
        num_earlier_features: int,
        drafter: RoundDrafter | None,
        graphs: bool,
        max_graph_batch: int,
        shares_state: bool = False,
    ) -> None:
        self._model = model
        self._pool = pool
        self.state = state
        self._is_first = is_first
        self._is_last = is_last
        self._capture = tuple(capture)
        self._num_earlier = num_earlier_features
        self._drafter = drafter
        self._max_graph_batch = max_graph_batch
        self._inputs: dict[int, _Inputs] = {}
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        self._graph_pool = GraphPool(state.device, captures=graphs)
        self._sampled_slots: set[int] = set()
        self._tells = is_first or not shares_state
        self._newest: dict[int, int] = {}

    def learn(self, plan: StepPlan) -> None:
        """Takes in openings and page changes, of plans of any kind."""
        if self._tells:
            self.state.open(plan.openings)
            self.state.change_pages(plan.pages)
        for opening in plan.openings:
            (self._sampled_slots.add if opening.temperature > 0 else self._sampled_slots.discard)(opening.slot)

    def run(self, plan: StepPlan, payload: Tensor | None) -> Tensor:
        """Launches a round.

        Args:
            payload: [round_size * V, hidden * (1 + features so far)] of the stage before.

        Returns:
            The payload for the next stage; on the last one [round_size, width] int64, for `outcomes`. Both are
            overwritten by the next round.
        """
        size = plan.round_size
        inputs = self._inputs_of(size)
        if self._is_first and not self._is_last and any(segment.carry for segment in plan.segments):
            self.state.order.follow(plan.microbatch, self._newest[plan.microbatch], _FOLLOW_TIMEOUT_S)
        self._newest[plan.microbatch] = plan.step
        self.state.begin(plan.segments, inputs.slots, tell=self._tells)
        if inputs.payload is not None:
            assert payload is not None, "a later stage needs the hidden states of the one before"
            inputs.payload.copy_(payload, non_blocking=True)
        is_greedy = not any(segment.slot in self._sampled_slots for segment in plan.segments)
        graph = self._graphs.get((size, is_greedy))
        output = self._round(inputs, is_greedy) if graph is None else graph.replay()
        if self._is_last and not self._is_first:
            self.state.order.launched(plan.microbatch, plan.step)
        return output

    def capture(self, sizes: Sequence[int]) -> int:
        """Warms rounds of these sizes up, greedy and sampled, and captures them where graphs are wanted.

        Nothing but padding runs: no page, slot or state that is anybody's changes.

        Returns:
            Bytes of device memory that the graphs took.
        """
        for size in sorted(sizes, reverse=True):  # the largest first: the others' memory fits into its pool
            inputs = self._inputs_of(size)
            inputs.slots.fill_(self.state.padding_slot)
            for is_greedy in (True, False) if self._is_last else (True,):
                graph = self._graph_pool.capture(
                    partial(self._round, inputs, is_greedy), wanted=size <= self._max_graph_batch
                )
                if graph is not None:
                    self._graphs[size, is_greedy] = graph
            if not self._is_last and (size, True) in self._graphs:
                self._graphs[size, False] = self._graphs[size, True]
        return sum({id(graph): graph.num_bytes for graph in self._graphs.values()}.values())

    def _inputs_of(self, size: int) -> "_Inputs":
        inputs = self._inputs.get(size)
        if inputs is None:
            device = self.state.device
            slots = torch.full((size,), self.state.padding_slot, dtype=torch.int64, device=device)
            payload = None
            if not self._is_first:
                columns = self._model.config.hidden_size * (1 + self._num_earlier)
                dtype = torch.float32 if device.type == "cpu" else self._model.dtype
                payload = torch.zeros(size * self.state.shape.nodes, columns, dtype=dtype, device=device)
            inputs = self._inputs[size] = _Inputs(slots, payload)
        return inputs

    # --- the round itself --------------------------------------------------------------------------------------

    def _round(self, inputs: "_Inputs", is_greedy: bool) -> Tensor:
        rows = self.state.read(inputs.slots)
        self._compact(rows)
        depths, visible = tree_rows(rows.parents, rows.num_nodes)
        batch = self._batch(rows, depths, visible)
        if inputs.payload is None:
            hidden, earlier = self._model.embed(rows.tokens.flatten()), []
        else:
            parts = torch.split(inputs.payload, self._model.config.hidden_size, dim=-1)
            hidden, earlier = parts[0].contiguous(), list(parts[1:])
        hidden, captured = self._model.run_layers(hidden, batch, self._pool, self._capture)
        features = [*earlier, *(captured[layer] for layer in self._capture)]
        if not self._is_last:
            return torch.cat((hidden, *features), dim=-1) if features else hidden
        return self._end(rows, depths, hidden, features, is_greedy)

    def _compact(self, rows: RoundRows) -> None:
        if self.state.path_len == 1 or not self._pool.layers:
            return  # the root's KV lies where it belongs
        num_accepted = (rows.accepted >= 0).sum(1, dtype=torch.int32)
        compact_kv(self._pool.as_bytes(), rows.page_tables, rows.start - num_accepted, rows.accepted.contiguous())

    def _batch(self, rows: RoundRows, depths: Tensor, visible: Tensor) -> TreeBatch:
        nodes = self.state.shape.nodes
        local = torch.arange(nodes, device=self.state.device)
        return TreeBatch(
            positions=(rows.start.unsqueeze(1) + depths).flatten(),
            row_slots=self._slots(rows, local, local < rows.num_nodes.unsqueeze(1)),
            visible=visible.flatten(),
            starts=rows.start,
            page_tables=rows.page_tables,
            rows_each=nodes,
            num_tail=nodes,
            page_size=self.state.page_size,
        )

    def _slots(self, rows: RoundRows, local: Tensor, is_real: Tensor) -> Tensor:
        """[sequences * n] flat slots of positions start + local, -1 where `is_real` [sequences, n] is not."""
        size = self.state.page_size
        slots = rows.start.long().unsqueeze(1) + local
        pages = rows.page_tables.gather(1, (slots // size).clamp(max=self.state.max_pages - 1)).long()
        return torch.where(is_real, pages * size + slots % size, -1).flatten()

    def _end(
        self, rows: RoundRows, depths: Tensor, hidden: Tensor, features: Sequence[Tensor], is_greedy: bool
    ) -> Tensor:
        """Samples, walks, extends, grows, and writes the state; returns what `outcomes` reads."""
        count, nodes = rows.tokens.shape
        logits = self._model.logits(self._model.final_norm(hidden))
        places = (rows.start.unsqueeze(1) + depths + 1).flatten()
        params = self.state.sampling(rows.slots.repeat_interleave(nodes), is_greedy=is_greedy)
        sampled = sample(logits, params, places).view(count, nodes)
        path_len = self.state.path_len
        accepted, num_accepted = walk_trees(rows.tokens, rows.parents, rows.num_nodes, sampled, path_len - 1)
        path = accepted.long().clamp(min=0)
        emitted = torch.where(accepted >= 0, sampled.gather(1, path), -1)
        last = (num_accepted.long() - 1).clamp(min=0).unsqueeze(1)
        bonus = emitted.gather(1, last).squeeze(1).clamp(min=0)
        start = rows.start + num_accepted
        if self._drafter is None:
            tokens, parents, num_nodes = bonus.unsqueeze(1), rows.parents, torch.ones_like(rows.num_nodes)
        else:
            outputs = self._extend(self._drafter, rows, hidden, features, path, accepted, emitted)
            output = outputs.gather(1, last.unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
            tokens, parents, num_nodes = self._drafter.growth.grow(output, bonus, start, rows.page_tables)
        after = RoundRows(rows.slots, start, accepted, tokens, parents, num_nodes, rows.page_tables)
        return torch.cat((emitted, self.state.write(after)), dim=1)

    def _extend(
        self,
        drafter: RoundDrafter,
        rows: RoundRows,
        hidden: Tensor,
        features: Sequence[Tensor],
        path: Tensor,
        accepted: Tensor,
        emitted: Tensor,
    ) -> Tensor:
        """Makes the drafter's rows of the accepted path final: [sequences, S + 1, hidden] outputs."""
        count, path_len = path.shape
        device = self.state.device
        first_rows = torch.arange(count, device=device).unsqueeze(1) * self.state.shape.nodes
        index = (first_rows + path).flatten()
        wanted = drafter.layer.feature_layers
        captured = dict(zip(sorted({layer for layer in wanted if layer >= 0}), features, strict=True))
        columns = [self._model.final_norm(hidden[index]) if layer < 0 else captured[layer][index] for layer in wanted]
        local = torch.arange(path_len, device=device)
        limit = drafter.layer.position_limit - 1
        batch = TreeBatch(
            positions=(rows.start.unsqueeze(1) + local).clamp(max=limit).int().flatten(),
            row_slots=self._slots(rows, local, accepted >= 0),
            visible=torch.where(accepted >= 0, (torch.ones_like(local) << (local + 1)) - 1, 0).flatten(),
            starts=rows.start,
            page_tables=rows.page_tables,
            rows_each=path_len,
            num_tail=path_len,
            page_size=self.state.page_size,
        )
        fused = drafter.layer.fuse(torch.cat(columns, dim=-1) if len(columns) > 1 else columns[0])
        outputs = drafter.layer.forward(fused, emitted.clamp(min=0).flatten(), batch, drafter.pool)
        return outputs.view(count, path_len, -1)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Where a round of one size finds what changes: requests, and the hidden states of the stage before."""

    slots: Tensor
    payload: Tensor | None
