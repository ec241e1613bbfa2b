"""Links between stages: threads of one process, and two processes, whose hidden states go by either channel."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gloo_peer
import pytest
import torch
from shared_peer_memory import SharedPeerMemory
from torch import Tensor

from graftline.engine import links_distributed
from graftline.engine.config import StageChannel
from graftline.engine.links import LocalLink, QueuedSender
from graftline.engine.links_distributed import DistributedLink, StageStar, connect_stages, leave_job
from graftline.engine.links_payload import MAX_UNFINISHED_SENDS
from graftline.engine.links_peer import PeerPayloads, Place
from graftline.engine.plan import Heartbeat, Message, Segment, StageReady, StepPlan, Stop
from graftline.errors import PeerUnavailableError


class NoWay:
    """Where nothing may go."""

    def put(self, payload: Tensor) -> Callable[[], None]:
        raise AssertionError(f"{tuple(payload.shape)} went another way")

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"{rows} rows were taken another way")


def plan(step: int, rows: int) -> StepPlan:
    return StepPlan(step, 0, [], [], [Segment(0, 0, list(range(rows)), None, rows, -1, [], False)], False)


def test_a_local_link_keeps_order_and_passes_tensors_by_reference() -> None:
    link, payload = LocalLink(), torch.ones(2, 3)
    link.send(Heartbeat(1))
    link.send(plan(4, 2), payload)
    link.close()
    assert link.receive() == (Heartbeat(1), None)
    message, received = link.receive()
    assert message == plan(4, 2)
    assert received is payload
    for _ in range(2):
        with pytest.raises(PeerUnavailableError, match="closed"):
            link.receive()


def test_closing_a_local_link_wakes_its_receiver() -> None:
    link, errors = LocalLink(), []

    def receive() -> None:
        try:
            link.receive()
        except PeerUnavailableError as error:
            errors.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    link.close()
    receiver.join(10)
    assert len(errors) == 1


Channel = tuple[StageChannel, str, str]
"""With what memory of the other end each end can have, see `gloo_peer.memory_named`."""
CHANNELS = pytest.mark.parametrize(
    "channel",
    [
        (StageChannel.HOST, "none", "none"),
        (StageChannel.DIRECT, "none", "none"),
        (StageChannel.DIRECT, "well", "well"),
    ],
    ids=["host", "direct", "memory"],
)


@contextmanager
def peer(flood: int, channel: Channel) -> Iterator[tuple[DistributedLink, StageStar, "subprocess.Popen[bytes]"]]:
    """A second process behind links, echoing plans. Gloo stands for NCCL in the direct channel, and memory that both
    share for memory of GPUs.
    """
    store = gloo_peer.join(0, 0, is_master=True)
    kind, own_memory, their_memory = channel
    words = (str(store.port), str(flood), kind.value, their_memory)
    child = subprocess.Popen([sys.executable, gloo_peer.__file__, *words])
    memory = gloo_peer.memory_named(own_memory)
    try:
        gloo_peer.enter(0, store)
        ends = connect_stages(2, 0, torch.device("cpu"), kind, memory=memory)
        assert ends.downstream is not None
        assert ends.by_memory is (own_memory == their_memory == "well")
        yield ends.downstream, ends.stars[0], child
        child.wait(30)
        if memory is not None:
            is_tried = {own_memory, their_memory}.isdisjoint({"none", "allocate", "open"})
            assert (memory.num_held > 0) is is_tried, "what nothing went by is given back"
            assert (ends.ring_bytes > 0) is ends.by_memory
            assert (memory.copied > 4) is ends.by_memory, "more than the trial went through memory, if anything"
    finally:
        child.kill()
        child.wait()
        assert leave_job(10)
        if memory is not None:
            memory.close()


def echoed(star: StageStar) -> tuple[StageReady, Tensor | None]:
    assert star.results is not None
    message, payload = star.results.receive()
    assert isinstance(message, StageReady)
    return message, payload


def stop(downstream: DistributedLink, star: StageStar, child: "subprocess.Popen[bytes]") -> None:
    assert star.control is not None
    downstream.send(Stop())
    star.control.send(Stop())
    assert child.wait(30) == 0


@CHANNELS
def test_two_processes_exchange_plans_with_hidden_states(channel: Channel) -> None:
    """CASES P13: both ends send more than a socket holds before either receives; nothing waits for ever."""
    with peer(flood=8, channel=channel) as (downstream, star, child):
        # 64 rows x 40000 floats: 10 MB, sent while the other end still sends its own 8 MB.
        payloads = [
            torch.randn(64, 40000),
            torch.randn(1, 576).bfloat16(),
            torch.randn(3, 8).half(),
            None,
            torch.empty(0, 16),
            torch.randn(6, 4).t(),
        ]

        def send_all() -> None:
            for step, payload in enumerate(payloads):
                downstream.send(plan(step, 5000 if step == 3 else 2), payload)

        sender = threading.Thread(target=send_all)
        sender.start()
        assert [echoed(star)[0].layout for _ in range(8)] == [b"x" * (1 << 20)] * 8
        for step, sent in enumerate(payloads):
            message, payload = echoed(star)
            # The plan of step 3 is longer than a first frame.
            assert message == StageReady(step, b"5000" if step == 3 else b"2")
            assert (payload is None) is (sent is None)
            if sent is not None and payload is not None:
                assert payload.dtype is sent.dtype
                assert torch.equal(payload, sent * 2)
        sender.join(30)
        stop(downstream, star, child)


@CHANNELS
def test_steps_in_flight_keep_their_hidden_states(channel: Channel) -> None:
    """More steps are sent than sends may be unfinished, from one tensor that every step overwrites."""
    failures: list[str] = []
    with peer(flood=0, channel=channel) as (downstream, star, child):
        queued = QueuedSender(downstream, "plan-sender", failures.append)
        count = 2 * MAX_UNFINISHED_SENDS + 1

        def send_all() -> None:
            hidden = torch.empty(3, 16)
            for step in range(count):
                hidden.fill_(step)
                queued.send(plan(step, 3), hidden)
            hidden.fill_(-1)

        sender = threading.Thread(target=send_all)
        sender.start()
        for step in range(count):
            message, payload = echoed(star)
            assert message.stage == step
            assert payload is not None
            assert torch.equal(payload, torch.full((3, 16), 2.0 * step))
        sender.join(10)
        assert queued.close(10)
        assert failures == []
        stop(downstream, star, child)


@pytest.mark.parametrize(
    ("own_memory", "their_memory"),
    [(fault, "well") for fault in ("none", "allocate", "open", "write", "await")]
    + [("well", fault) for fault in ("none", "allocate", "open", "write", "await")],
)
def test_ends_that_do_not_reach_each_others_memory_take_the_other_way(own_memory: str, their_memory: str) -> None:
    """Both take it, whichever of them is in trouble; what never arrives is waited for by nobody for long."""
    with peer(0, (StageChannel.DIRECT, own_memory, their_memory)) as (downstream, star, child):
        sent = torch.randn(3, 8)
        downstream.send(plan(0, 2), sent)
        payload = echoed(star)[1]
        assert payload is not None
        assert torch.equal(payload, sent * 2)
        stop(downstream, star, child)


def test_a_payload_that_cannot_be_shipped_ends_its_link() -> None:
    """Its thread would be gone, and everything sent from then on with it, without a word."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Broken:
        def send(self, message: Message, payload: Tensor | None = None) -> None:
            self.prepare(message, payload)()

        def prepare(self, message: Message, payload: Tensor | None = None) -> Callable[[], None]:
            def ship() -> None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            return ship

    queued = QueuedSender(Broken(), "plan-sender", told.put)
    queued.send(plan(0, 1), torch.ones(1, 4))
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert told.get(timeout=10) == reason
    with pytest.raises(PeerUnavailableError, match=reason):
        queued.send(plan(1, 1))


def test_ends_meet_with_their_own_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trial puts on a default stream would go to another GPU's otherwise."""
    current: list[torch.device] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def gpus(*_: object) -> list[object]:
        assert current == [torch.device("cuda", 1)]
        return []

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(links_distributed, "_gpus_of", gpus)
    ends = connect_stages(1, 0, torch.device("cuda", 1), memory=SharedPeerMemory())
    assert ends.upstream is ends.downstream is None
    assert current == []


def test_numbers_of_a_long_life_wrap_around() -> None:
    """A ring that has been used four thousand million times, less one."""
    source, target = SharedPeerMemory(), SharedPeerMemory()
    try:
        ring, read = target.allocate(2 * 256 + 4), source.allocate(256)
        place, begun = Place(ring, ring + 2 * 256, read), (1 << 32) - 1
        for address in (place.written, place.read):
            target.write(address, begun)
        ends = [PeerPayloads(memory, place, 2, 256, begun, NoWay()) for memory in (source, target)]
        for value in range(5):
            ends[0].put(torch.full((2, 3), value))
            assert ends[1].take(2, 3, torch.int64).tolist() == [[value] * 3] * 2
        assert target.read(place.written) == source.read(place.read) == 4
    finally:
        for memory in (source, target):
            memory.close()


@CHANNELS
def test_the_death_of_the_other_end_is_an_error(channel: Channel) -> None:
    failures: list[str] = []
    with peer(flood=0, channel=channel) as (downstream, star, child):
        queued = QueuedSender(downstream, "plan-sender", failures.append)
        queued.send(plan(0, 1), torch.ones(1, 4))
        assert echoed(star)[0].stage == 0
        child.kill()
        assert star.results is not None
        with pytest.raises(PeerUnavailableError, match="stage 1 is gone"):
            star.results.receive()

        def send_until_refused() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                queued.send(plan(1, 1), torch.ones(1, 4))
                time.sleep(0.01)

        with pytest.raises(PeerUnavailableError, match="stage 1 is gone"):
            send_until_refused()
        assert len(failures) <= 1
