import threading
import time

import numpy as np
import pytest

from graftline.errors import InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.in_process import InProcessHub, InProcessTransport


def soon() -> float:
    return time.monotonic() + 5.0


class Side:
    """A transport with one registered array."""

    def __init__(self, hub: InProcessHub, fill: int, num_bytes: int = 256) -> None:
        self.transport: InProcessTransport = hub.join()
        self.array = np.full(num_bytes, fill, dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.transport.register(self.address, num_bytes)


def test_bytes_land_exactly_where_they_should() -> None:
    hub = InProcessHub()
    here, there = Side(hub, 7), Side(hub, 0)
    copies = [Copy(here.address, there.address + 16, 8), Copy(here.address + 100, there.address + 255, 1)]
    here.transport.write(there.transport.session_id, copies, soon())
    assert np.flatnonzero(there.array).tolist() == [*range(16, 24), 255]


@pytest.mark.parametrize("offset", [-1, 249, 256])
def test_both_ends_are_checked_before_anything_moves(offset: int) -> None:
    hub = InProcessHub()
    here, there = Side(hub, 7), Side(hub, 0)
    good = Copy(here.address, there.address, 8)
    with pytest.raises(InvalidRequestError, match="copy source"):
        here.transport.write(there.transport.session_id, [good, Copy(here.address + offset, good[1], 8)], soon())
    with pytest.raises(TransferFailedError, match="has no region") as caught:
        here.transport.write(there.transport.session_id, [good, Copy(good[0], there.address + offset, 8)], soon())
    assert caught.value.drained
    assert not there.array.any()


def test_unknown_and_closed_sessions_fail_drained() -> None:
    hub = InProcessHub()
    here, there = Side(hub, 7), Side(hub, 0)
    copy = Copy(here.address, there.address, 8)
    there.transport.close()
    for session_id in (there.transport.session_id, "in-process:99"):
        with pytest.raises(TransferFailedError) as caught:
            here.transport.write(session_id, [copy], soon())
        assert caught.value.drained
    here.transport.close()
    with pytest.raises(TransferFailedError, match="closed"):
        here.transport.write(here.transport.session_id, [copy], soon())


def test_two_hubs_do_not_see_each_other() -> None:
    here, there = Side(InProcessHub(), 7), Side(InProcessHub(), 0)
    here.transport.write(here.transport.session_id, [Copy(here.address, here.address + 8, 8)], soon())
    assert here.transport.session_id == there.transport.session_id
    with pytest.raises(TransferFailedError):
        here.transport.write(there.transport.session_id, [Copy(here.address, there.address, 8)], soon())


def test_close_waits_for_a_write_and_a_busy_peer_ends_at_the_deadline() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow_copy(dst: int, src: int, num_bytes: int) -> None:
        entered.set()
        assert leave.wait(10)

    hub = InProcessHub(slow_copy)
    here, there = Side(hub, 7), Side(hub, 0)
    write = (there.transport.session_id, [Copy(here.address, there.address, 8)])
    writer = threading.Thread(target=here.transport.write, args=(*write, soon()))
    writer.start()
    assert entered.wait(10)
    with pytest.raises(TransferFailedError, match="busy") as caught:
        here.transport.write(*write, time.monotonic())
    assert caught.value.drained
    closer = threading.Thread(target=there.transport.close)
    closer.start()
    assert closer.is_alive()
    leave.set()
    closer.join(10)
    writer.join(10)
    assert not closer.is_alive()
