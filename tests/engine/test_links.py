"""Links between stages: threads of one process, and two processes over gloo."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import gloo_peer
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graftline.engine.links import GlooLink, GlooStar, LocalLink, connect_gloo_stages
from graftline.engine.plan import Heartbeat, Segment, StageReady, StepPlan, Stop
from graftline.errors import PeerUnavailableError


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


@contextmanager
def peer(flood: int) -> Iterator[tuple[GlooLink, GlooStar, "subprocess.Popen[bytes]"]]:
    """A second process behind gloo links, echoing plans."""
    store = gloo_peer.join(0, 0, is_master=True)
    child = subprocess.Popen([sys.executable, gloo_peer.__file__, str(store.port), str(flood)])
    try:
        gloo_peer.enter(0, store)
        _, downstream, stars = connect_gloo_stages(2, 0)
        assert downstream is not None
        yield downstream, stars[0], child
        child.wait(30)
    finally:
        child.kill()
        child.wait()
        dist.destroy_process_group()


def echoed(star: GlooStar) -> tuple[StageReady, Tensor | None]:
    assert star.results is not None
    message, payload = star.results.receive()
    assert isinstance(message, StageReady)
    return message, payload


def test_two_processes_exchange_plans_with_hidden_states() -> None:
    """CASES P13: both ends send more than a socket holds before either receives; nothing waits for ever."""
    with peer(flood=8) as (downstream, star, child):
        assert star.control is not None
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
        downstream.send(Stop())
        star.control.send(Stop())
        assert child.wait(30) == 0


def test_the_death_of_the_other_end_is_an_error() -> None:
    with peer(flood=0) as (downstream, star, child):
        downstream.send(plan(0, 1))
        assert echoed(star)[0].stage == 0
        child.kill()
        assert star.results is not None
        with pytest.raises(PeerUnavailableError, match="stage 1 is gone"):
            star.results.receive()
