"""Decode rounds of fixed shape: compact, verify, walk, extend and grow without a value read on the host.

A round of n requests is padded to one of a few sizes, each with its V rows a request, whatever their trees are, so that
on CUDA it is captured once and replayed. What a round leaves (tree, committed length, accepted nodes) stays in
`RoundState`, from where the next one takes it: that one can be launched before the host has read this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftline.engine.device_growth import DeviceGrowth
from graftline.engine.draft_module import DraftModule, feature_columns
from graftline.engine.graph_capture import CapturedGraph, GraphPool, sizes_up_to
from graftline.engine.kv_pool import KvPool
from graftline.engine.links_payload import Payloads
from graftline.engine.models.target_model import TargetModel
from graftline.engine.plan import StepPlan
from graftline.engine.round_returns import ReturnedRounds, ReturningRounds
from graftline.engine.round_state import RoundState
from graftline.kernels.draft_inputs import gather_columns
from graftline.kernels.kv_compact import compact_kv
from graftline.kernels.round_open import OpenRounds
from graftline.kernels.round_walk import WalkedRounds, walk_rounds
from graftline.kernels.sample import argmax, sample
from graftline.kernels.tree_batch import TreeBatch
from graftline.kernels.upload import RecurringUploads

_FOLLOW_TIMEOUT_S = 60.0


def round_sizes(max_running: int) -> tuple[int, ...]:
    """Sequences of the rounds that there are: powers of two, and the most there can be."""
    return sizes_up_to(max_running)


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
        nodes_of: V of a round by its size.
        graphs: capture rounds of up to `max_graph_batch` sequences, on CUDA.
        shares_state: all stages work on one state: the first one tells it what the host knows.
        returns: ways between the last stage and the earlier ones, for stages with states of their own whose rounds run
            ahead of the host; see `engine/round_returns.py`.
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
        nodes_of: Callable[[int], int],
        graphs: bool,
        max_graph_batch: int,
        shares_state: bool = False,
        returns: Sequence[Payloads] = (),
    ) -> None:
        self._model = model
        self._pool = pool
        self.state = state
        self._is_first = is_first
        self._is_last = is_last
        self._capture = tuple(capture)
        self._num_earlier = num_earlier_features
        self._drafter = drafter
        self._nodes_of = nodes_of
        self._max_graph_batch = max_graph_batch
        self._inputs: dict[int, _Inputs] = {}
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        self._graph_pool = GraphPool(state.device, captures=graphs)
        self._sampled_slots: set[int] = set()
        self._tells = is_first or not shares_state
        self._follows = is_first and not is_last and shares_state
        self._newest: dict[int, int] = {}
        self._uploads = RecurringUploads(state.device)
        self._returning = ReturningRounds(returns) if is_last and returns else None
        self._returned = ReturnedRounds(returns[0], state) if not is_last and returns else None

    def await_returns(self, plan: StepPlan) -> None:
        """Takes back what a plan builds on, of plans of any kind; before `learn`."""
        if self._returned is not None:
            self._returned.catch_up(plan)

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
        if self._follows and any(segment.carry for segment in plan.segments):
            self.state.order.follow(plan.microbatch, self._newest[plan.microbatch], _FOLLOW_TIMEOUT_S)
        self._newest[plan.microbatch] = plan.step
        self.state.begin(plan.segments, inputs.slots, self._uploads, tell=self._tells)
        if inputs.payload is not None:
            assert payload is not None, "a later stage needs the hidden states of the one before"
            inputs.payload.copy_(payload, non_blocking=True)
        is_greedy = not any(segment.slot in self._sampled_slots for segment in plan.segments)
        graph = self._graphs.get((size, is_greedy))
        output = self._round(inputs, is_greedy) if graph is None else graph.replay()
        if self._is_last and not self._is_first:
            self.state.order.launched(plan.microbatch, plan.step)
        if self._returning is not None:
            self._returning.send(output)
        if self._returned is not None:
            self._returned.launched(plan)
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
                payload = torch.zeros(size * self._nodes_of(size), columns, dtype=dtype, device=device)
            inputs = self._inputs[size] = _Inputs(slots, payload)
        return inputs

    # --- the round itself --------------------------------------------------------------------------------------

    def _round(self, inputs: "_Inputs", is_greedy: bool) -> Tensor:
        nodes = self._nodes_of(inputs.slots.shape[0])
        opened = self.state.read(inputs.slots, nodes)
        self._compact(opened)
        batch = TreeBatch(
            positions=opened.positions,
            row_slots=opened.row_slots,
            visible=opened.visible,
            starts=opened.start,
            page_tables=opened.page_tables,
            rows_each=nodes,
            num_tail=nodes,
            page_size=self.state.page_size,
        )
        if inputs.payload is None:
            hidden, earlier = self._model.embed(opened.tokens.flatten()), []
        else:
            parts = torch.split(inputs.payload, self._model.config.hidden_size, dim=-1)
            hidden, earlier = parts[0].contiguous(), list(parts[1:])
        hidden, captured = self._model.run_layers(hidden, batch, self._pool, self._capture)
        features = [*earlier, *(captured[layer] for layer in self._capture)]
        if not self._is_last:
            return torch.cat((hidden, *features), dim=-1) if features else hidden
        return self._end(inputs.slots, opened, hidden, features, is_greedy)

    def _compact(self, opened: OpenRounds) -> None:
        if self.state.path_len == 1 or not self._pool.layers:
            return  # the root's KV lies where it belongs
        compact_kv(self._pool.as_bytes(), opened.page_tables, opened.accepted_start, opened.accepted)

    def _end(
        self, slots: Tensor, opened: OpenRounds, hidden: Tensor, features: Sequence[Tensor], is_greedy: bool
    ) -> Tensor:
        """Samples, walks, extends, grows, and writes the state; returns what `outcomes` reads."""
        logits = self._model.logits(self._model.final_norm(hidden))
        if is_greedy:
            sampled = argmax(logits)
        else:
            params = self.state.sampling(slots.repeat_interleave(opened.tokens.shape[1]))
            sampled = sample(logits, params, opened.positions + 1)
        drafter, page_size = self._drafter, self.state.page_size
        limit = self._model.config.context_length if drafter is None else drafter.layer.position_limit
        walked = walk_rounds(opened, sampled.view(opened.tokens.shape), page_size, limit)
        if drafter is None:
            tokens, parents, nodes = walked.bonus.unsqueeze(1), opened.parents, torch.ones_like(opened.num_nodes)
        else:
            outputs = self._extend(drafter, opened, walked, hidden, features)
            output = outputs[walked.last]
            tokens, parents, nodes = drafter.growth.grow(output, walked.bonus, walked.start, opened.page_tables)
        return self.state.write(slots, walked, tokens, parents, nodes)

    def _extend(
        self,
        drafter: RoundDrafter,
        opened: OpenRounds,
        walked: WalkedRounds,
        hidden: Tensor,
        features: Sequence[Tensor],
    ) -> Tensor:
        """Makes the drafter's rows of the accepted path final: [sequences * path_len, hidden] outputs."""
        columns = feature_columns(drafter.layer.feature_layers, features, lambda: self._model.final_norm(hidden))
        batch = TreeBatch(
            positions=walked.positions,
            row_slots=walked.row_slots,
            visible=walked.visible,
            starts=opened.start,
            page_tables=opened.page_tables,
            rows_each=self.state.path_len,
            num_tail=self.state.path_len,
            page_size=self.state.page_size,
        )
        fused = drafter.layer.fuse(gather_columns(columns, walked.nodes))
        return drafter.layer.forward(fused, walked.next_tokens, batch, drafter.pool)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Where a round of one size finds what changes: requests, and the hidden states of the stage before."""

    slots: Tensor
    payload: Tensor | None
