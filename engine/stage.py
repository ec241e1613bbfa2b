"""One stage at work: applies a plan to its layers. It decides nothing; stage 0's scheduler did.

The last stage also samples, walks, extends and grows (`engine/last_stage.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from graftline.engine.device_rounds import DeviceRounds
from graftline.engine.kv_pool import KvPool
from graftline.engine.last_stage import LastStage
from graftline.engine.models.target_model import TargetModel
from graftline.engine.plan import Segment, StepPlan, StepReport
from graftline.engine.prompt_end import CapturedStep
from graftline.engine.prompt_graphs import PromptGraphs
from graftline.engine.round_results import RoundReader
from graftline.engine.stage_states import StageStates
from graftline.engine.step_gate import StepGate
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.kv_compact import compact_kv
from graftline.kernels.upload import pad_rows, upload

Emit = Callable[[StepReport], None]


class Stage:
    """A contiguous range of target layers with their KV and recurrent state.

    Args:
        model: the stage's layers, with the embedding on the first stage.
        pool: pages of these layers.
        capture: features that this stage must take, as numbers of decoder layers passed.
        last: what only the last stage does, or None.
        states: recurrent state of the linear layers among them, None without any.
        rounds: its part of decode rounds of fixed shape, None where there are none.
        prompts: its captured steps of prompts, None where there are none; not beside states.
        gate: told when a step's KV is written.
    """

    def __init__(
        self,
        model: TargetModel,
        pool: KvPool,
        *,
        is_first: bool,
        capture: Sequence[int],
        last: LastStage | None,
        gate: StepGate,
        device: torch.device,
        states: StageStates | None = None,
        rounds: DeviceRounds | None = None,
        prompts: PromptGraphs | None = None,
    ) -> None:
        assert states is None or prompts is None, "captured steps know no states"
        self._model = model
        self._pool = pool
        self._is_first = is_first
        self._capture = tuple(capture)
        self._last = last
        self._gate = gate
        self._device = device
        self._states = states
        self.rounds = rounds
        self._prompts = prompts
        self._reader = RoundReader() if rounds is not None and last is not None else None
        self._pages: dict[int, list[int]] = {}

    def await_returns(self, plan: StepPlan) -> None:
        """Takes back what a plan's requests left on the last stage: the stage's stream waits for that one's."""
        if self.rounds is not None:
            self.rounds.await_returns(plan)

    def execute(self, plan: StepPlan, payload: Tensor | None, emit: Emit) -> Tensor | None:
        """Runs one step.

        Args:
            payload: [rows, hidden * (1 + features so far)] from the stage before; None on the first stage.
            emit: takes what the last stage has to say.

        Returns:
            The payload for the next stage; None on the last one.
        """
        for opening in plan.openings:
            self._pages[opening.slot] = []
            if self._last is not None:
                self._last.open(opening)
        for change in plan.pages:
            pages = self._pages[change.slot]
            del pages[change.first_index :]
            pages.extend(change.page_ids)
        if self.rounds is not None:
            self.rounds.learn(plan)
        if plan.round_size:
            return self._execute_round(plan, payload, emit)
        self._compact(plan.segments)
        hidden, captured, earlier, step = self._run_layers(plan, payload)
        features = [*earlier, *(captured[layer] for layer in self._capture)]
        self._gate.mark(plan.step, drafter=False)
        if self._last is None:
            return torch.cat((hidden, *features), dim=-1) if features else hidden
        drafted = partial(self._gate.mark, plan.step, drafter=True)
        self._last.finish(plan, hidden, features, self._pages, drafted, emit, step)
        return None

    def forget(self, slot: int) -> None:
        """Drops what a slot's last opening left; the next opening would replace it."""
        self._pages.pop(slot, None)
        if self._last is not None:
            self._last.forget(slot)

    def close(self) -> None:
        """Ends what the stage runs beside its thread, once nothing is executed any more."""
        if self._reader is not None:
            self._reader.close()

    def _execute_round(self, plan: StepPlan, payload: Tensor | None, emit: Emit) -> Tensor | None:
        assert self.rounds is not None, "a round of fixed shape on a stage that was not built for them"
        output = self.rounds.run(plan, payload)
        if self._reader is None:
            return output  # the next round of this size overwrites it, behind the link that takes it
        self._reader.read(plan, output, emit)
        return None

    def _run_layers(
        self, plan: StepPlan, payload: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor], list[Tensor], CapturedStep | None]:
        """(residual stream behind the layers, own features, earlier stages' features) of a planned step, and what can
        follow a captured one."""
        segments = [
            SegmentRows(segment.start, segment.num_rows, self._pages[segment.slot], segment.parents)
            for segment in plan.segments
        ]
        if self._prompts is not None and self._prompts.takes(segments):
            hidden, earlier = self._enter(plan, payload)
            step = self._prompts if self._prompts.is_followed else None
            return *self._prompts.run(hidden, segments), earlier, step
        batch = build_attention_batch(segments, self._pool.geometry.page_size, self._device)
        states = None
        if self._states is not None:
            self._states.begin(plan)
            states = self._states.step(batch, plan.segments)
        hidden, earlier = self._enter(plan, payload)
        return *self._model.run_layers(hidden, batch, self._pool, self._capture, states), earlier, None

    def _enter(self, plan: StepPlan, payload: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if self._is_first:
            tokens = [token for segment in plan.segments for token in segment.tokens]
            return self._model.embed(upload(tokens, torch.int64, self._device)), []
        assert payload is not None, "a later stage needs the hidden states of the one before"
        assert payload.shape[0] == plan.num_rows, f"{payload.shape[0]} hidden rows for {plan.num_rows} planned"
        hidden, *features = torch.split(payload.to(self._device), self._model.config.hidden_size, dim=-1)
        return hidden.contiguous(), features

    def _compact(self, segments: Sequence[Segment]) -> None:
        """Moves the KV of accepted nodes to the end of the committed part, where it is not there already."""
        moved = [segment for segment in segments if segment.accepted != list(range(len(segment.accepted)))]
        if not moved or not self._pool.layers:
            return
        tables = [self._pages[segment.slot] for segment in moved]
        compact_kv(
            self._pool.as_bytes(),
            _padded(tables, 0, self._device),
            torch.tensor(
                [segment.start - len(segment.accepted) for segment in moved], dtype=torch.int32, device=self._device
            ),
            _padded([segment.accepted for segment in moved], -1, self._device),
        )


def _padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> Tensor:
    return torch.tensor(pad_rows(rows, filler), dtype=torch.int32, device=device)
