"""Several writes to one peer at once: what goes out together, and who fails when something does."""

import random
import threading
import time
from collections.abc import Sequence

import pytest
from scripted_engine import ScriptedEngine

from graftline.errors import GraftlineError, InvalidRequestError, TransferFailedError
from graftline.kv_transfer import mooncake_attempt, mooncake_group, mooncake_session
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.transfer_job import TransferJob, TransferOutcome
from graftline.kv_transfer.transfer_worker import TransferWorker
from graftline.kv_transfer.transport import GroupedWrite

BASE, TARGET, MIB = 1 << 32, 1 << 44, 1 << 20
PEER = "10.0.0.1:15001"
NEVER_S = float("inf")
PATIENCE_S = 10.0


class Write:
    """Notes its ends; `ends` is shared by a group and keeps their order."""

    def __init__(self, number: int, ends: "list[Write]", num_bytes: int = MIB, count: int = 1) -> None:
        base = number << 36
        self.number = number
        self.copies: Sequence[Copy] | None = [
            Copy(BASE + base + 2 * num_bytes * index, TARGET + base + 2 * num_bytes * index, num_bytes)
            for index in range(count)
        ]
        self.deadline_s = time.monotonic() + PATIENCE_S
        self.started = 0
        self.error: GraftlineError | None = None
        self.seconds = 0.0
        self._ends = ends

    def start(self) -> Sequence[Copy] | None:
        self.started += 1
        return self.copies

    def end(self, error: GraftlineError | None, seconds: float) -> None:
        assert self not in self._ends, "ended twice"
        self.error, self.seconds = error, seconds
        self._ends.append(self)

    @property
    def address(self) -> int:
        assert self.copies is not None
        return self.copies[0].src_address


class Group:
    """Writes to one peer, and how they ended."""

    def __init__(self, count: int, num_bytes: int = MIB, copies_each: int = 1) -> None:
        self.ends: list[Write] = []
        self.writes = [Write(number, self.ends, num_bytes, copies_each) for number in range(count)]

    def __getitem__(self, number: int) -> Write:
        return self.writes[number]

    @property
    def order(self) -> list[int]:
        return [write.number for write in self.ends]

    @property
    def failed(self) -> dict[int, bool]:
        """Who failed, and whether drained."""
        errors = {write.number: write.error for write in self.ends if write.error is not None}
        return {number: isinstance(error, TransferFailedError) and error.drained for number, error in errors.items()}


def opened(engine: ScriptedEngine, copies_per_batch: int = 64, max_in_flight: int = 4) -> MooncakeTransport:
    """A transport whose peer was written to before."""
    config = MooncakeConfig(
        "10.0.0.2",
        stall_timeout_s=1,
        max_in_flight=max_in_flight,
        max_copy_bytes=1 << 30,
        copies_per_batch=copies_per_batch,
        spin_s=0.001,
        intra_node_nvlink=True,
    )
    transport = MooncakeTransport(config, lambda _: engine)
    transport.register(BASE, 1 << 42)
    transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + PATIENCE_S)
    engine.calls.clear()
    return transport


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def test_small_writes_share_a_batch_and_end_in_order(engine: ScriptedEngine) -> None:
    group = Group(5)
    assert opened(engine).begin(PEER, group.writes).advance(NEVER_S)
    assert engine.calls == [[write.address for write in group.writes]]
    assert group.order == [0, 1, 2, 3, 4]
    assert not group.failed
    assert len({write.seconds for write in group.writes}) == 1, "equal shares of one batch's time"


def test_batches_grow_with_what_was_submitted(engine: ScriptedEngine) -> None:
    """The first leaves at once, and many large writes cost few calls all the same."""
    group = Group(8, 16 * MIB)
    assert opened(engine).begin(PEER, group.writes).advance(NEVER_S)
    assert [len(call) for call in engine.calls] == [1, 1, 2, 4]
    assert group.order == list(range(8))


def neighbours(count: int, num_bytes: int, src: int = BASE, dst: int = TARGET) -> Group:
    """Writes of one copy each that follow each other on both sides, as those of a prompt's chunks do."""
    group = Group(count)
    for number, write in enumerate(group.writes):
        write.copies = [Copy(src + number * num_bytes, dst + number * num_bytes, num_bytes)]
    return group


def test_writes_that_follow_each_other_on_both_sides_meet_in_one_copy(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), neighbours(5, MIB)
    apart = group[2].copies = [Copy(BASE + 2 * MIB, TARGET + 2 * MIB, 16), Copy(BASE + 2 * MIB + 32, TARGET, MIB - 32)]
    assert transport.begin(PEER, group.writes).advance(NEVER_S)
    assert engine.arrived[1:] == [
        (BASE, TARGET, 2 * MIB + 16),  # writes 0 and 1, and what write 2 begins with
        apart[1],
        (BASE + 3 * MIB, TARGET + 3 * MIB, 2 * MIB),
    ]
    assert len(engine.calls) == 1
    assert group.order == [0, 1, 2, 3, 4]
    assert not group.failed


@pytest.mark.parametrize("side", ["source", "destination"])
def test_writes_that_follow_each_other_on_one_side_only_stay_apart(engine: ScriptedEngine, side: str) -> None:
    transport, group = opened(engine), neighbours(2, MIB)
    source, target = (32, 0) if side == "destination" else (0, 32)
    group[1].copies = [Copy(BASE + MIB + source, TARGET + MIB + target, 16)]
    assert transport.begin(PEER, group.writes).advance(NEVER_S)
    assert engine.arrived[1:] == [(BASE, TARGET, MIB), *(group[1].copies or ())]


def test_no_copy_leaves_its_pool_or_is_longer_than_allowed(engine: ScriptedEngine) -> None:
    """A pool may lie right behind another one, here and at the peer: no engine takes a copy out of two."""
    transport = opened(engine)
    end = BASE + (1 << 42)
    transport.register(end, 4 * MIB)
    group = neighbours(4, MIB, src=end - 2 * MIB)
    assert transport.begin(PEER, group.writes).advance(NEVER_S)
    assert engine.arrived[1:] == [(end - 2 * MIB, TARGET, 2 * MIB), (end, TARGET + 2 * MIB, 2 * MIB)]
    engine.calls.clear()
    transport.begin(PEER, neighbours(3, 1 << 29).writes).finish()
    transport.begin(PEER, neighbours(8, 1 << 28).writes).finish()
    assert max(num_bytes for _, _, num_bytes in engine.arrived) == 1 << 30


@pytest.mark.parametrize("taken", [False, True])
def test_writes_that_met_in_one_copy_are_tried_alone(engine: ScriptedEngine, taken: bool) -> None:
    transport, group = opened(engine), neighbours(4, MIB)
    bad = group[2].address

    def is_bad(copies: list[tuple[int, int, int]]) -> bool:
        return any(address <= bad < address + num_bytes for address, _, num_bytes in copies)

    if taken:
        engine.status = lambda target, address, looks: (
            -1 if any(is_bad(copies) and copies[0][0] == address for _, copies in engine.under_way.values()) else 1
        )
    else:
        engine.refuses = lambda target, copies: is_bad(copies)
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {2: not taken}
    assert group.order == [0, 1, 2, 3]
    assert engine.arrived[1:] == [
        tuple(copy) for write in (group[0], group[1], group[3]) for copy in write.copies or ()
    ]


def test_a_batch_takes_as_long_as_the_next_one_to_prepare(engine: ScriptedEngine) -> None:
    """By the rate of late: a way that is fast gets more at once, since every call costs the same."""
    transport = opened(engine)
    began_s = time.monotonic()
    engine.status = lambda target, address, looks: int(time.monotonic() >= began_s + 0.002)
    transport.begin(PEER, Group(1, 8 << 30).writes).finish()  # up to 4 TB/s
    engine.calls.clear()
    assert transport.begin(PEER, Group(8, 16 * MIB).writes).advance(NEVER_S)
    assert len(engine.calls[0]) > 1
    assert sum(len(call) for call in engine.calls) == 8


def test_a_write_is_spread_over_batches_that_it_does_not_fit_in(engine: ScriptedEngine) -> None:
    group = Group(3, 16, copies_each=5)
    opened(engine, copies_per_batch=4).begin(PEER, group.writes).finish()
    assert [len(call) for call in engine.calls] == [4, 4, 4, 3]
    wanted = [tuple(copy) for write in group.writes for copy in write.copies or ()]
    assert engine.arrived[1:] == wanted
    assert group.order == [0, 1, 2]


def test_copies_that_end_one_by_one_end_their_writes_in_order(engine: ScriptedEngine) -> None:
    """On TCP: every copy is a batch, and the bound of those under way holds for the group."""
    group = Group(4, 16, copies_each=3)
    opened(engine, copies_per_batch=1).begin(PEER, group.writes).finish()
    assert [len(call) for call in engine.calls] == [1] * 12
    assert engine.most_under_way == 4
    assert group.order == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [False, True])
def test_one_bad_write_fails_alone(engine: ScriptedEngine, taken: bool) -> None:
    """Whether the engine refuses the batch or takes it and fails: each write of it is tried by itself then."""
    transport, group = opened(engine), Group(5)

    def is_bad(copies: list[tuple[int, int, int]]) -> bool:
        return any(address == group[2].address for address, _, _ in copies)

    if taken:
        engine.status = lambda target, address, looks: (
            -1 if any(is_bad(copies) and copies[0][0] == address for _, copies in engine.under_way.values()) else 1
        )
    else:
        engine.refuses = lambda target, copies: is_bad(copies)
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {2: not taken}
    assert group.order == [0, 1, 2, 3, 4]
    assert engine.calls == [[write.address for write in group.writes], *([write.address] for write in group.writes)]


def test_a_slow_failure_is_not_retried_and_what_was_not_begun_is_written(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late bytes of a first try could land after the second had succeeded."""
    monkeypatch.setattr(mooncake_group, "_QUICK_FAILURE_S", 0.0)
    transport, group = opened(engine, max_in_flight=1), Group(4, 16 * MIB)
    engine.status = lambda target, address, looks: -1 if address == group[1].address else 1
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {1: False}
    assert engine.calls == [[write.address] for write in group.writes]
    assert len(engine.probes) == 2, "asked for a sign of life before it goes on"


def test_a_dead_peer_gets_nothing_more(engine: ScriptedEngine) -> None:
    transport, group = opened(engine, max_in_flight=1), Group(4, 16 * MIB)
    engine.status = lambda target, address, looks: -1
    engine.probe = lambda session_id: -102
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {0: False, 1: True, 2: True, 3: True}
    assert engine.calls == [[group[0].address]]
    assert "cannot be reached" in str(group[3].error)


def test_a_peer_that_is_forgotten_meanwhile_gets_no_second_try(engine: ScriptedEngine) -> None:
    """Who answers under its port by then is another process: its pages are not this group's."""
    transport, group = opened(engine, max_in_flight=2), Group(2, 16 * MIB)
    engine.status = lambda target, address, looks: -1

    def answer(session_id: str) -> int:
        transport.forget(PEER)
        return 0

    engine.probe = answer
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {0: False, 1: False}
    assert len(engine.calls) == 2, "a first try each"
    engine.status = lambda target, address, looks: 1
    engine.probe = lambda session_id: 0
    transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + PATIENCE_S)


def test_nothing_of_a_late_write_is_submitted(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), Group(3)
    group[1].deadline_s = time.monotonic()
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {1: True}
    assert sorted(address for call in engine.calls for address in call) == [group[0].address, group[2].address]


def test_a_deadline_in_the_middle_ends_one_write_of_a_batch(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), Group(2)
    group[0].deadline_s = time.monotonic() + 0.05
    let_go = threading.Event()
    engine.status = lambda target, address, looks: int(let_go.is_set())
    writing = threading.Thread(target=transport.begin(PEER, group.writes).finish)
    writing.start()
    until_s = time.monotonic() + PATIENCE_S
    while not group.ends and time.monotonic() < until_s:
        time.sleep(0.001)
    assert group.failed == {0: False}
    let_go.set()
    writing.join(PATIENCE_S)
    assert group.order == [0, 1]
    assert group.failed == {0: False}
    assert not engine.under_way


def test_a_write_that_anothers_deadline_stopped_goes_on(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it failed, so nothing of it is written twice, however long the other one took."""
    monkeypatch.setattr(mooncake_group, "_QUICK_FAILURE_S", 0.0)
    transport, group = opened(engine, copies_per_batch=1, max_in_flight=2), Group(2, 16, copies_each=3)
    assert group[0].copies is not None
    group[0].copies = group[0].copies[:1]
    group[0].deadline_s = time.monotonic() + 0.05
    engine.status = lambda target, address, looks: int(address != group[0].address)
    transport.begin(PEER, group.writes).finish()
    assert group.failed == {0: False}
    assert group.order == [0, 1]
    written = [address for call in engine.calls for address in call]
    assert len(written) == len(set(written)) == 4


def test_unregistered_and_unwanted_writes_leave_the_others_alone(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), Group(4)
    group[1].copies = [Copy(BASE - 1, TARGET, 16)]
    group[2].copies = None
    transport.begin(PEER, group.writes).finish()
    assert group.order == [1, 0, 3]
    assert isinstance(group[1].error, InvalidRequestError)
    assert engine.calls == [[group[0].address, group[3].address]]


def test_a_peer_that_was_not_heard_of_is_left_to_finish(engine: ScriptedEngine) -> None:
    """First contact can block: not in the thread that submits."""
    transport, group = opened(engine), Group(2)
    made = transport.begin("10.0.0.7:15001", group.writes)
    assert not made.advance(NEVER_S)
    assert not engine.calls
    assert not group[0].started
    made.finish()
    assert group.order == [0, 1]
    assert not group.failed


def test_nobody_submits_beside_a_first_contact(engine: ScriptedEngine) -> None:
    """The engine holds a lock of all peers then, for a minute if that peer freezes: not in the thread that submits."""
    transport, group = opened(engine), Group(1)
    in_contact, let_go = threading.Event(), threading.Event()

    def submit(target: str, address: int) -> int | None:
        if target != PEER:
            in_contact.set()
            assert let_go.wait(PATIENCE_S)
        return None

    engine.submit = submit
    opening = threading.Thread(target=transport.begin("10.0.0.7:15001", Group(1).writes).finish)
    opening.start()
    assert in_contact.wait(PATIENCE_S)
    engine.calls.clear()
    made = transport.begin(PEER, group.writes)
    assert not made.advance(NEVER_S)
    assert not engine.calls
    let_go.set()
    opening.join(PATIENCE_S)
    assert made.advance(NEVER_S)
    assert group.order == [0]


def test_what_takes_long_is_handed_on_with_its_turn(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), Group(2)
    engine.status = lambda target, address, looks: 0
    made = transport.begin(PEER, group.writes)
    assert not made.advance(time.monotonic() + 0.01)
    assert len(engine.calls) == 1
    assert not transport.begin(PEER, [Write(9, [])]).advance(NEVER_S), "the peer is busy"
    with pytest.raises(TransferFailedError, match="busy"):
        transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + 0.01)
    engine.status = lambda target, address, looks: 1
    finishing = threading.Thread(target=made.finish)
    finishing.start()
    finishing.join(PATIENCE_S)
    assert group.order == [0, 1]
    transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + PATIENCE_S)


def test_what_should_take_longer_than_allowed_is_only_submitted(engine: ScriptedEngine) -> None:
    """The way's rate is known from earlier writes: no time is spent on a group that cannot end within it."""
    transport = opened(engine)
    began_s = 0.0

    def status(target: str, address: int, looks: int) -> int:
        return int(time.monotonic() >= began_s + 0.2)

    engine.status = status
    began_s = time.monotonic()
    transport.begin(PEER, Group(1, 64 * MIB).writes).finish()
    began_s = time.monotonic()
    group = Group(1, 64 * MIB)
    made = transport.begin(PEER, group.writes)
    assert not made.advance(time.monotonic() + 0.1)
    assert time.monotonic() < began_s + 0.1
    made.finish()
    assert group.order == [0]


def test_a_write_that_waited_for_something_else_does_not_make_later_ones_slow(engine: ScriptedEngine) -> None:
    transport = opened(engine)
    ready_s = time.monotonic() + 0.3
    engine.status = lambda target, address, looks: int(time.monotonic() >= ready_s)
    transport.begin(PEER, Group(1, 64 * MIB).writes).finish()
    ready_s = time.monotonic() + 0.001
    began_s, group = time.monotonic(), Group(1, 64 * MIB)
    transport.begin(PEER, group.writes).finish()
    assert group.order == [0]
    assert time.monotonic() < began_s + 0.1


class _Clock:
    """Stands in for `time`: looking at it takes a microsecond, and every sleep takes too long by as much as told."""

    def __init__(self, oversleep_s: float) -> None:
        self.now_s = 0.0
        self.num_sleeps = 0
        self.oversleep_once_s = 0.0
        self._oversleep_s = oversleep_s

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        self.now_s += seconds + self._oversleep_s + self.oversleep_once_s
        self.oversleep_once_s = 0.0


class _TimedCopies:
    """Has an engine's writes end so long after they were submitted, on a clock that is everybody's."""

    def __init__(self, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, clock: _Clock, copy_s: float) -> None:
        for module in (mooncake_attempt, mooncake_session):
            monkeypatch.setattr(module, "time", clock)
        self.end_s = 0.0

        def submit(target: str, address: int) -> None:
            self.end_s = clock.now_s + copy_s

        engine.submit = submit
        engine.status = lambda target, address, looks: int(clock.now_s >= self.end_s)


@pytest.mark.parametrize("oversleep_s", [0.0, 300e-6, 3e-3])
def test_sleeping_is_left_off_as_early_as_it_is_inexact(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, oversleep_s: float
) -> None:
    """Whoever sleeps past a write's end takes the way for slower than it is, and sleeps even longer the next time."""
    transport, clock = opened(engine), _Clock(oversleep_s)
    copies = _TimedCopies(engine, monkeypatch, clock, 500e-6)
    late_s = []
    for _ in range(200):
        transport.begin(PEER, Group(1, 64 * MIB).writes).finish()
        late_s.append(clock.now_s - copies.end_s)
    assert sorted(late_s)[150] < 20e-6
    assert clock.num_sleeps > 0


def test_a_standstill_is_not_how_inexact_sleeping_is(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes behind it sleep as before, instead of keeping a processor busy to their ends."""
    transport, clock = opened(engine), _Clock(0.0)
    _TimedCopies(engine, monkeypatch, clock, 20e-3)
    num_sleeps = []
    for stood_still_s in (0.0, 0.0, 5.0, 0.0, 0.0):
        clock.oversleep_once_s = stood_still_s
        before, group = clock.num_sleeps, Group(1, 64 * MIB)
        group[0].deadline_s = clock.now_s + 60
        transport.begin(PEER, group.writes).finish()
        num_sleeps.append(clock.num_sleeps - before)
    assert num_sleeps[2] == 1
    assert min(num_sleeps[3:]) > num_sleeps[1] / 2


def test_a_first_contact_says_nothing_of_the_way(engine: ScriptedEngine) -> None:
    """It maps the peer's memory: whoever took it for the way's speed would leave the next write to another thread."""
    transport = opened(engine)
    peer = "10.0.0.9:15001"
    ready_s = time.monotonic() + 0.3
    engine.status = lambda target, address, looks: int(time.monotonic() >= ready_s)
    transport.begin(peer, Group(1, 64 * MIB).writes).finish()
    ready_s, group = time.monotonic() + 0.001, Group(1, 64 * MIB)
    assert transport.begin(peer, group.writes).advance(time.monotonic() + 0.2)
    assert group.order == [0]


@pytest.mark.parametrize("in_group", [True, False])
def test_what_an_engine_does_not_take_at_a_peer_that_answers_is_refused(engine: ScriptedEngine, in_group: bool) -> None:
    """Another way to that peer may work: GPUs of one host need not reach each other."""
    transport, group = opened(engine), Group(2)
    engine.refuses = lambda target, copies: True
    if in_group:
        transport.begin(PEER, group.writes).finish()
        errors = [write.error for write in group.writes]
    else:
        with pytest.raises(TransferFailedError) as caught:
            transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + PATIENCE_S)
        errors = [caught.value]
    assert all(isinstance(error, TransferFailedError) and error.refused and error.drained for error in errors)


def test_a_refused_write_that_is_taken_over_has_not_ended(engine: ScriptedEngine) -> None:
    """All its copies are handed on: the engine took none."""
    transport, group = opened(engine, copies_per_batch=2), Group(3, 16, copies_each=3)
    engine.refuses = lambda target, copies: any((source - BASE) >> 36 < 2 for source, _, _ in copies)
    handed_on: dict[GroupedWrite, list[Copy]] = {}

    def refused(write: GroupedWrite, copies: Sequence[Copy], error: TransferFailedError) -> bool:
        handed_on[write] = list(copies)
        return write is not group[1]

    transport.begin(PEER, group.writes, refused).finish()
    assert handed_on == {group[0]: group[0].copies, group[1]: group[1].copies}
    assert group.failed == {1: True}
    assert sorted(group.order) == [1, 2]


@pytest.mark.parametrize("how", ["gone", "taken", "too late", "slow"])
def test_a_failure_that_another_way_would_not_mend_is_no_refusal(engine: ScriptedEngine, how: str) -> None:
    transport, group = opened(engine), Group(1)
    if how == "taken":
        engine.status = lambda target, address, looks: 5
    else:
        engine.refuses = lambda target, copies: True
    if how == "gone":
        engine.probe = lambda session_id: -1
    if how == "too late":
        group[0].deadline_s = time.monotonic() - 1
    if how == "slow":  # nobody knows whether the peer still answers

        def refuse_late(target: str, copies: object) -> bool:
            time.sleep(0.6)
            return True

        engine.refuses = refuse_late
    transport.begin(PEER, group.writes).finish()
    error = group[0].error
    assert isinstance(error, TransferFailedError)
    assert not error.refused
    assert error.drained == (how != "taken")


def test_a_write_that_waits_for_another_peers_first_contact_is_not_refused(engine: ScriptedEngine) -> None:
    """The engine was not asked: that says nothing of the way."""
    transport, group = opened(engine), Group(1)
    in_contact, let_go = threading.Event(), threading.Event()

    def submit(target: str, address: int) -> int | None:
        if target == PEER:
            return 0  # from now on it has to be contacted anew
        in_contact.set()
        assert let_go.wait(PATIENCE_S)
        return None

    engine.submit = submit
    opening = threading.Thread(target=transport.begin("10.0.0.7:15001", Group(1).writes).finish)
    opening.start()
    assert in_contact.wait(PATIENCE_S)
    group[0].deadline_s = time.monotonic() + 0.2
    transport.begin(PEER, group.writes).finish()
    let_go.set()
    opening.join(PATIENCE_S)
    error = group[0].error
    assert isinstance(error, TransferFailedError)
    assert error.drained
    assert not error.refused


def test_an_engine_that_breaks_gives_the_turn_back(engine: ScriptedEngine) -> None:
    transport = opened(engine)

    def broken(target: str, address: int) -> int:
        raise ZeroDivisionError

    engine.submit = broken
    with pytest.raises(ZeroDivisionError):
        transport.begin(PEER, Group(2).writes).advance(NEVER_S)
    engine.submit = lambda target, address: None
    transport.write(PEER, [Copy(BASE, TARGET, 16)], time.monotonic() + PATIENCE_S)
    transport.close()
    assert engine.unregistered == [BASE]


def test_a_closed_transport_refuses_groups(engine: ScriptedEngine) -> None:
    transport, group = opened(engine), Group(2)
    transport.close()
    made = transport.begin(PEER, group.writes)
    assert not made.advance(NEVER_S)
    made.finish()
    assert group.failed == {0: True, 1: True}
    assert not engine.calls


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_and_cancels_end_every_job_once_and_truly(seed: int) -> None:
    """CASES B03: who succeeds has all its bytes there; who failed drained has none; nothing is left behind."""
    draw = random.Random(seed)
    engine = ScriptedEngine()
    transport = opened(engine, copies_per_batch=draw.choice([1, 3, 64]))
    broken = {draw.randrange(200) for _ in range(draw.choice([0, 3, 40]))}

    def number(address: int) -> int:
        return (address - BASE) >> 36

    engine.refuses = lambda target, copies: any(number(source) in broken and source % 2 for source, _, _ in copies)
    engine.status = lambda target, address, looks: -1 if number(address) in broken else int(looks >= 1)
    worker = TransferWorker(transport, max_queued_jobs=1000)
    copies = [
        [Copy(BASE + (n << 36) + 64 * i + draw.choice([0, 1]), TARGET + (n << 36) + 64 * i, 16) for i in range(size)]
        for n, size in enumerate(draw.choice([1, 1, 2, 7]) for _ in range(60))
    ]
    outcomes = write_in_groups(worker, copies, draw, groups=(1, 1, 5, 20), cancel_share=0.3)
    assert worker.wait_idle(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    arrived = set(engine.arrived)
    for index, outcome in outcomes.items():
        there = {tuple(copy) for copy in copies[index]} & arrived
        if outcome.ok:
            assert len(there) == len(copies[index])
            assert outcome.num_bytes == 16 * len(copies[index])
        elif outcome.drained:
            assert not there
    transport.close()
    assert not engine.under_way


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_and_cancels_of_writes_that_meet_in_one_copy(seed: int) -> None:
    """CASES B03, byte by byte: most writes go on behind the one before them, some over the border of two pools."""
    draw = random.Random(seed)
    engine = ScriptedEngine()
    transport = opened(engine, copies_per_batch=draw.choice([3, 64]), max_in_flight=draw.choice([1, 4]))
    border = BASE + (1 << 42)
    transport.register(border, MIB)
    src, dst = border - draw.randrange(2000, 20000), TARGET
    broken = {src + draw.randrange(40000) for _ in range(draw.choice([0, 3, 12]))}
    breaks_late = draw.random() < 0.5

    def is_broken(copies: Sequence[tuple[int, int, int]]) -> bool:
        return any(address <= bad < address + num_bytes for address, _, num_bytes in copies for bad in broken)

    def status(target: str, address: int, looks: int) -> int:
        batches = [copies for _, copies in engine.under_way.values() if copies[0][0] == address]
        return -1 if breaks_late and any(map(is_broken, batches)) else int(looks >= 1)

    engine.refuses = lambda target, copies: not breaks_late and is_broken(copies)
    engine.status = status
    writes: list[list[Copy]] = []
    for _ in range(60):
        writes.append([])
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            size = draw.choice([8, 100, 700])
            size = border - src if src < border < src + size else size
            writes[-1].append(Copy(src, dst, size))
            src, dst = src + size + 8 * (draw.random() < 0.15), dst + size + 8 * (draw.random() < 0.15)
    worker = TransferWorker(transport)
    outcomes = write_in_groups(worker, writes, draw, groups=(1, 5, 20), cancel_share=0.4, late_share=0.05)
    assert worker.close(PATIENCE_S)
    transport.close()
    arrived = engine.arrived[1:]
    assert not any(address < border < address + num_bytes for address, _, num_bytes in arrived)
    there = set(pairs_of(arrived))
    assert there <= {pair for copies in writes for pair in pairs_of(copies)}
    for index, outcome in outcomes.items():
        wanted = set(pairs_of(writes[index]))
        if outcome.ok:
            assert wanted <= there
            assert outcome.num_bytes == len(wanted)
        elif outcome.drained:
            assert not wanted & there


def pairs_of(copies: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Where every byte of some copies comes from, and where it goes."""
    return [(src + step, dst + step) for src, dst, num_bytes in copies for step in range(num_bytes)]


def write_in_groups(
    worker: TransferWorker,
    writes: Sequence[Sequence[Copy]],
    draw: random.Random,
    *,
    groups: Sequence[int],
    cancel_share: float,
    late_share: float = 0.0,
) -> dict[int, TransferOutcome]:
    """Gives a worker jobs, some at once, cancels some on the way, and waits until each has ended, once.

    Args:
        groups: how many are given at once.
        late_share: of jobs whose time is over when they are given.
    """
    outcomes: dict[int, TransferOutcome] = {}
    ended = threading.Condition()

    def job(index: int) -> TransferJob:
        def done(outcome: TransferOutcome) -> None:
            with ended:
                assert index not in outcomes
                outcomes[index] = outcome
                ended.notify_all()

        patience_s = -1.0 if late_share and draw.random() < late_share else PATIENCE_S
        return TransferJob(index, PEER, writes[index], time.monotonic() + patience_s, done)

    at = 0
    while at < len(writes):
        count = min(draw.choice(groups), len(writes) - at)
        worker.submit(*(job(index) for index in range(at, at + count)))
        at += count
        if draw.random() < cancel_share:
            worker.cancel(draw.randrange(at), lambda drained: None)
    with ended:
        assert ended.wait_for(lambda: len(outcomes) == len(writes), PATIENCE_S)
    return outcomes
