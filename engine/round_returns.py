"""Brings what the last stage's rounds left back to the earlier stages, where each stage has a device of its own.

A round's rows of `RoundState` travel from device to device, so that an earlier stage can run the next round of the
same requests before the host has read this one (contract 4). The last stage sends those of every round; they are taken
in the same order, and only once a plan needs them: by then they are on their way, and no receive lies about.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.config import EngineConfig
from graftline.engine.links_payload import Payloads
from graftline.engine.plan import StepPlan
from graftline.engine.round_state import RoundState
from graftline.kernels.round_open import RoundLayout
from graftline.kernels.upload import RecurringUploads


def returned_bytes(config: EngineConfig) -> int:
    """Of the largest round that goes back; 0 where none does."""
    if not config.returns_rounds:
        return 0
    path_len = config.tree.longest_path_len
    columns = path_len + RoundLayout(path_len, config.tree.nodes).width
    return config.max_running * columns * torch.int64.itemsize


class ReturningRounds:
    """The last stage's end.

    Args:
        ways: to every earlier stage.
    """

    def __init__(self, ways: Sequence[Payloads]) -> None:
        self._ways = tuple(ways)

    def send(self, results: Tensor) -> None:
        """Sends [sequences, columns] int64 on their way; work put on the stream later may overwrite them.

        Raises:
            PeerUnavailableError: a stage is gone.
        """
        for way in self._ways:
            way.put(results)()


@dataclass(slots=True)
class _Expected:
    step: int
    microbatch: int
    slots: list[int]


class ReturnedRounds:
    """An earlier stage's end.

    Args:
        way: from the last stage.
        state: this stage's own, written.
    """

    def __init__(self, way: Payloads, state: RoundState) -> None:
        self._way = way
        self._state = state
        self._uploads = RecurringUploads(state.device)
        self._expected: deque[_Expected] = deque()

    def launched(self, plan: StepPlan) -> None:
        """A round was launched here, whose rows will be returned."""
        slots = [segment.slot for segment in plan.segments]
        slots += [self._state.padding_slot] * (plan.round_size - len(slots))
        self._expected.append(_Expected(plan.step, plan.microbatch, slots))

    def catch_up(self, plan: StepPlan) -> None:
        """Takes what a plan builds on: all up to the newest round of its microbatch. Rows still to come of slots that
        the plan tells about are older than what it says, and will be left out.

        Raises:
            PeerUnavailableError: the last stage is gone.
        """
        own = [index for index, expected in enumerate(self._expected) if expected.microbatch == plan.microbatch]
        for _ in range(own[-1] + 1 if own else 0):
            self._take(self._expected.popleft())
        told = {opening.slot for opening in plan.openings}
        told |= {segment.slot for segment in plan.segments if not segment.carry}
        for expected in self._expected:
            expected.slots = [self._state.unwanted_slot if slot in told else slot for slot in expected.slots]

    def _take(self, expected: _Expected) -> None:
        columns = self._state.path_len + self._state.layout.width
        results = self._way.take(len(expected.slots), columns, torch.int64)
        self._state.put(self._uploads.of(expected.slots), results[:, self._state.path_len :])
