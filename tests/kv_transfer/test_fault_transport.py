import time
from collections.abc import Iterator

import numpy as np
import pytest

from graftline.errors import InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.fault_transport import Fault, FaultKind, FaultPlan, FaultTransport
from graftline.kv_transfer.in_process import InProcessHub


def test_a_plan_names_writes_and_everything_else() -> None:
    plan = FaultPlan.parse("delay:2s@3, fail@5,late:0.5s@*")
    assert plan.fault_of(3) == Fault(FaultKind.DELAY, 2.0)
    assert plan.fault_of(5) == Fault(FaultKind.FAIL)
    assert plan.fault_of(1) == plan.fault_of(99) == Fault(FaultKind.LATE, 0.5)
    assert FaultPlan.parse("").fault_of(1) is None


@pytest.mark.parametrize(
    "text", ["fail", "fail@", "fail@0", "fail:1s@1", "delay@1", "late@2", "drop@1", "fail@1;", "@1"]
)
def test_a_plan_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="fault plan"):
        FaultPlan.parse(text)


class Pair:
    """A faulty transport and the peer it writes to; byte `n` of the source is `n`."""

    def __init__(self, plan: str) -> None:
        hub = InProcessHub()
        self.peer = hub.join()
        self.faulty = FaultTransport(hub.join(), FaultPlan.parse(plan))
        self.source = np.arange(16, dtype=np.uint8)
        self.target = np.full(16, 255, dtype=np.uint8)
        self.faulty.register(self.source.ctypes.data, 16)
        self.peer.register(self.target.ctypes.data, 16)

    def write(self) -> None:
        copy = Copy(self.source.ctypes.data, self.target.ctypes.data, 16)
        self.faulty.write(self.peer.session_id, [copy], time.monotonic() + 10)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.faulty.close()


@pytest.mark.parametrize("pair", ["fail@2"], indirect=True)
def test_only_the_chosen_write_fails_and_nothing_is_written(pair: Pair) -> None:
    pair.write()
    pair.target[:] = 255
    with pytest.raises(TransferFailedError) as caught:
        pair.write()
    assert caught.value.drained
    assert pair.target.tolist() == [255] * 16
    pair.write()
    assert pair.target.tolist() == list(range(16))


@pytest.mark.parametrize("pair", ["late:600s@1"], indirect=True)
def test_a_late_write_has_failed_and_lands_afterwards(pair: Pair) -> None:
    with pytest.raises(TransferFailedError) as caught:
        pair.write()
    assert not caught.value.drained
    assert pair.target.tolist() == [255] * 16
    pair.faulty.close()
    assert pair.target.tolist() == list(range(16))


@pytest.mark.parametrize("pair", ["delay:0.05s@1"], indirect=True)
def test_a_delayed_write_works_later(pair: Pair) -> None:
    start = time.monotonic()
    pair.write()
    assert time.monotonic() - start >= 0.05
    assert pair.target.tolist() == list(range(16))


@pytest.mark.parametrize("pair", ["flip@1"], indirect=True)
def test_a_flipped_byte_looks_like_success(pair: Pair) -> None:
    pair.write()
    assert pair.target.tolist() == [1, *range(1, 16)]


@pytest.mark.parametrize("pair", ["lose:0.05s@1"], indirect=True)
def test_a_lost_write_fails_late_and_may_land(pair: Pair) -> None:
    start = time.monotonic()
    with pytest.raises(TransferFailedError) as caught:
        pair.write()
    assert time.monotonic() - start >= 0.05
    assert not caught.value.drained
    assert pair.target.tolist() == [255] * 16


@pytest.mark.parametrize("pair", ["fail@/2"], indirect=True)
def test_every_nth_write_fails(pair: Pair) -> None:
    failed = []
    for number in range(1, 7):
        try:
            pair.write()
        except TransferFailedError:
            failed.append(number)
    assert failed == [2, 4, 6]
