"""What the last stage's rounds leave reaches stages with devices of their own, in order, and never over newer words."""

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from msgspec import structs
from shared_peer_memory import SharedPeerMemory, share_memory
from stage_main import COMMAND
from tiny_world import TinyWorld, prompt
from torch import Tensor

from graftline.engine.config import EngineConfig, Role, StageChannel, StageMode
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.pipeline import StageCommand
from graftline.engine.plan import Segment, SlotOpening, StepPlan, StepResult
from graftline.engine.request import DraftTree, Request, RequestId, RequestKey, Sampling, Stopping, Token
from graftline.engine.round_returns import ReturnedRounds, ReturningRounds, returned_bytes
from graftline.engine.round_state import RoundState
from graftline.engine.service_api import DecodeEvent, DecodeFinished, Reserved, Tokens
from graftline.engine.transfer_port import NoTransfer
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.worker_engine import start_decode_engine
from graftline.kernels.upload import RecurringUploads

CPU = torch.device("cpu")
WAIT_S = 60.0


class Way:
    """Both ends of a way, in order."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def put(self, payload: Tensor) -> Callable[[], None]:
        self.sent.append(payload.clone())
        return lambda: None

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        taken = self.sent.popleft()
        assert taken.shape == (rows, columns)
        assert taken.dtype == dtype
        return taken


def plan(step: int, microbatch: int, carried: Sequence[int], told: Sequence[int] = (), size: int = 2) -> StepPlan:
    segments = [Segment(slot, 0, [], None, 0, -1, [], False, carry=True) for slot in carried]
    segments += [Segment(slot, 5, [9], [-1], 0, -1, [], False) for slot in told]
    return StepPlan(step, microbatch, [], [], segments, False, size)


def test_rounds_are_taken_in_order_when_their_microbatch_goes_on() -> None:
    state, way = RoundState(4, 32, NO_SPECULATION, 4, CPU), Way()
    returned, returning = ReturnedRounds(way, state), ReturningRounds([way])
    width = state.path_len + state.layout.width

    def leave(first: int) -> None:
        returning.send(torch.full((2, width), first) + torch.arange(2).unsqueeze(1))

    for step, microbatch, slots, value in ((0, 0, (0, 1), 10), (1, 1, (2,), 20), (2, 0, (0, 1), 30)):
        starting = plan(step, microbatch, (), slots)
        if step < 2:
            returned.catch_up(starting)
        returned.launched(starting)
        leave(value)
    returned.catch_up(plan(3, 1, (2,)))
    assert state._rows[:3, 0].tolist() == [10, 11, 20]
    assert len(way.sent) == 1, "the other microbatch's newest round is nobody's yet"
    returned.catch_up(plan(4, 0, (0, 1)))
    assert state._rows[:3, 0].tolist() == [30, 31, 20]
    assert state._rows[state.padding_slot, 0] == 21, "a round's padding is its own"


def test_older_rows_do_not_overwrite_what_a_plan_tells() -> None:
    """A slot that changed hands, or microbatches, before its last round came back."""
    state, way = RoundState(4, 32, NO_SPECULATION, 4, CPU), Way()
    returned, returning = ReturnedRounds(way, state), ReturningRounds([way])
    for step, microbatch, slots in ((0, 0, (0, 1)), (1, 1, (2, 3))):
        returned.launched(plan(step, microbatch, (), slots))
        returning.send(torch.full((2, state.path_len + state.layout.width), 7))
    moved = plan(2, 1, (2,), told=(1,))
    returned.catch_up(moved)
    state.begin(moved.segments, torch.zeros(2, dtype=torch.int64), RecurringUploads(CPU), tell=True)
    opened = StepPlan(3, 1, [SlotOpening(0, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1)], [], [], False, 0)
    returned.catch_up(opened)
    state._rows[0, 0] = 3
    returned.catch_up(plan(4, 0, ()))
    assert state._rows[:4, 0].tolist() == [3, 5, 7, 7]
    assert not way.sent


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),
        ({"overlap": False}, 1),
        ({"device_rounds": False}, 1),
        ({"stage_channel": StageChannel.HOST}, 1),
        ({"stage_channel": StageChannel.AUTO}, 1),
        ({"stage_channel": StageChannel.AUTO, "devices": ("cuda:0", "cuda:1")}, 2),
        ({"stage_channel": StageChannel.AUTO, "devices": ("cuda:0", "cuda:0")}, 1),
        ({"stage_mode": StageMode.THREADS}, 2),
        ({"stage_mode": StageMode.THREADS, "devices": ("cuda:0", "cuda:1")}, 1),
    ],
    ids=str,
)
def test_rounds_run_ahead_where_they_come_back(changes: dict[str, object], expected: int) -> None:
    fields: dict[str, object] = {"layer_split": (2, 2), "device_rounds": True, "tree": NO_SPECULATION}
    fields["stage_channel"] = StageChannel.DIRECT
    config = EngineConfig(model="none", role=Role.DECODE, **(fields | changes))  # type: ignore[arg-type]
    assert config.rounds_ahead == expected


@pytest.mark.parametrize("shape", [NO_SPECULATION, TreeShape(3, 1, 4, 5), TreeShape(5, 8, 64)], ids=str)
def test_the_largest_round_has_room_on_its_way_back(shape: TreeShape) -> None:
    """What is larger goes by NCCL, whose kernels wait for a plan that may never come."""
    config = EngineConfig(
        model="none",
        role=Role.DECODE,
        draft_head="head",
        layer_split=(2, 2),
        stage_channel=StageChannel.DIRECT,
        max_running=1000,
        tree=shape,
        device_rounds=True,
    )
    state, way = RoundState(1000, 32, shape, 4, CPU), Way()
    results = torch.zeros(1000, state.path_len + state.layout.width, dtype=torch.int64)
    ReturningRounds([way]).send(results)
    assert way.sent[0].nbytes == returned_bytes(config)
    assert returned_bytes(structs.replace(config, overlap=False)) == 0


@contextmanager
def decode_of(world: TinyWorld, shape: TreeShape, command: StageCommand) -> Iterator[DecodeScheduler]:
    """Three stages in processes of their own. Output of this model does not depend on KV, which nobody transfers."""
    config = EngineConfig(
        model=str(world.markov.path),
        role=Role.DECODE,
        draft_head=str(world.agrees) if shape.speculates else None,
        dtype="float32",
        layer_split=(1, 2, 1),
        stage_channel=StageChannel.DIRECT,
        page_size=4,
        num_pages=128,
        tree=shape,
        device_rounds=True,
    )
    started = start_decode_engine(config, lambda stage: NoTransfer(), command, WAIT_S)
    try:
        yield started.scheduler
    finally:
        started.stop(20)


@pytest.mark.system
@pytest.mark.parametrize("way", ["direct", "memory"])
@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), NO_SPECULATION], ids=str)
def test_processes_run_ahead_of_the_host(
    world: TinyWorld, shape: TreeShape, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go on shared slots, some seeded: the plain model's ids, most rounds launched unread."""
    carried: list[bool] = []
    command, memory = COMMAND, SharedPeerMemory()
    if way == "memory":
        command = share_memory(monkeypatch, COMMAND, memory)
    apply = DecodeScheduler._apply

    def spy(self: DecodeScheduler, result: StepResult) -> None:
        carried.append(any(len(batch.steps) > 1 for batch in self._batches._batches))
        apply(self, result)

    monkeypatch.setattr(DecodeScheduler, "_apply", spy)
    with decode_of(world, shape, command) as decode:
        calls = [_Call(decode, world, index) for index in range(12)]
        for call in calls[:6]:
            call.begin()
        for index, call in enumerate(calls):
            call.await_end()
            for following in calls[index + 6 : index + 7]:
                following.begin()
    assert sum(carried) > len(carried) / 2
    assert (memory.copied > 0) is (way == "memory")
    memory.close()


class _Call:
    """One request, handed over with its root alone."""

    def __init__(self, decode: DecodeScheduler, world: TinyWorld, index: int) -> None:
        self._decode = decode
        self._events: queue.SimpleQueue[DecodeEvent] = queue.SimpleQueue()
        self._sampling = Sampling(temperature=0.8, seed=index) if index % 2 else Sampling()
        self._max_tokens = 8 + 7 * index
        ids = prompt(5 + index, index)
        self._expected = world.markov.answer(ids, self._max_tokens, self._sampling)
        self._key = RequestKey(RequestId(str(index)), 0)
        stopping = Stopping(self._max_tokens)
        decode.reserve(Request(self._key, tuple(ids), len(ids), self._sampling, stopping), self._events.put)

    def begin(self) -> None:
        assert isinstance(self._events.get(timeout=WAIT_S), Reserved)
        first = self._expected[0]
        self._decode.start(self._key, Token(first), DraftTree.root_only(first))

    def await_end(self) -> None:
        found = self._expected[:1]
        while isinstance(event := self._events.get(timeout=WAIT_S), Tokens):
            found += [token.token_id for token in event.tokens]
        assert isinstance(event, DecodeFinished), event
        assert found == self._expected
