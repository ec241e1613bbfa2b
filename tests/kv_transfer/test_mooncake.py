"""The real engine between two real processes on loopback."""

import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from mooncake_peer import MooncakePeer
from mooncake_senders import send_from_many

from graftline.errors import InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport

pytestmark = pytest.mark.system

STALL_S = 2
WHILE_S = 20.0
SIZE = 1 << 22
StartPeer = Callable[..., MooncakePeer]


class Sender:
    """This process's side: a transport and a registered array of random bytes."""

    def __init__(self, num_bytes: int = SIZE) -> None:
        self.transport = MooncakeTransport(MooncakeConfig("127.0.0.1", stall_timeout_s=STALL_S, contact_timeout_s=2.0))
        self.array = np.random.default_rng(0).integers(0, 256, size=num_bytes, dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.transport.register(self.address, num_bytes)

    def copy(self, peer: MooncakePeer, src: int, dst: int, num_bytes: int) -> Copy:
        return Copy(self.address + src, peer.address + dst, num_bytes)

    def write(self, peer: MooncakePeer, *copies: Copy, timeout_s: float = 20.0) -> float:
        """Seconds it took."""
        start = time.monotonic()
        self.transport.write(peer.session_id, copies, start + timeout_s)
        return time.monotonic() - start

    def digest(self, src: int, num_bytes: int) -> str:
        return hashlib.sha256(self.array[src : src + num_bytes].tobytes()).hexdigest()


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.transport.close()


def test_bytes_land_exactly(sender: Sender, start_peer: StartPeer) -> None:
    peer = start_peer()
    expected = np.zeros(SIZE, dtype=np.uint8)
    spans = [(0, 5, 1), (7, 4096, 4095), (100_001, 300_000, 65_537), (1 << 20, 1 << 21, 1 << 20)]
    spans += [(4096 * index, 8192 * index + 500_000, 3000) for index in range(60)]
    sender.write(peer, *(sender.copy(peer, *span) for span in spans))
    for src, dst, num_bytes in spans:
        expected[dst : dst + num_bytes] = sender.array[src : src + num_bytes]
    assert peer.digest(0, SIZE) == hashlib.sha256(expected.tobytes()).hexdigest()


def test_hundred_transfers_between_processes_of_one_address(sender: Sender, start_peer: StartPeer) -> None:
    """CASES M03: two processes on one address are two peers, under any name of the host."""
    peer = start_peer()
    for index in range(100):
        sender.write(peer, sender.copy(peer, 8192 * index, 8192 * index, 8192))
    assert peer.digest(0, 819_200) == sender.digest(0, 819_200)
    peer.session_id = peer.session_id.replace("127.0.0.1", "localhost")
    sender.write(peer, sender.copy(peer, 1 << 20, 0, 65_536))
    assert peer.digest(0, 65_536) == sender.digest(1 << 20, 65_536)


def test_sixteen_concurrent_transfers_keep_their_bytes(sender: Sender, start_peer: StartPeer) -> None:
    """CASES M11."""
    peers = [start_peer(), start_peer()]
    part = SIZE // 16

    def send(index: int) -> None:
        for peer in peers:
            spans = [(part * index + 4096 * page, part * index + 4096 * page, 4096) for page in range(part // 4096)]
            sender.write(peer, *(sender.copy(peer, *span) for span in spans))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(16)))
    for peer in peers:
        assert peer.digest(0, SIZE) == sender.digest(0, SIZE)


def test_thirty_two_first_contacts_at_once(start_peer: StartPeer) -> None:
    """CASES M08."""
    peer = start_peer()
    send_from_many(peer.session_id, peer.address, num_senders=32, num_bytes=4096)
    expected = b"".join(bytes([index + 1]) * 4096 for index in range(32))
    assert peer.digest(0, 32 * 4096) == hashlib.sha256(expected).hexdigest()


def test_workers_with_ipv6_addresses_reach_each_other(start_peer: StartPeer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    peer = start_peer(host="::1")
    assert peer.session_id.startswith("[::1]:")
    send_from_many(peer.session_id, peer.address, num_senders=2, num_bytes=4096, host="::1")
    assert peer.digest(0, 2 * 4096) == hashlib.sha256(b"\x01" * 4096 + b"\x02" * 4096).hexdigest()


def test_one_sender_contacts_four_peers_at_once(sender: Sender, start_peer: StartPeer) -> None:
    """CASES M08."""
    peers = [start_peer(1 << 16) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda peer: sender.write(peer, sender.copy(peer, 0, 0, 1 << 16)), peers))
    assert {peer.digest(0, 1 << 16) for peer in peers} == {sender.digest(0, 1 << 16)}


@pytest.mark.parametrize("gap_s", [3, *(pytest.param(gap_s, marks=pytest.mark.slow) for gap_s in (6, 10, 30, 70))])
def test_a_write_after_an_idle_gap_works_at_once(sender: Sender, start_peer: StartPeer, gap_s: float) -> None:
    """CASES M01."""
    peer = start_peer()
    copies = [sender.copy(peer, 188_416 * index, 188_416 * index, 188_416) for index in range(8)]
    sender.write(peer, *copies)
    time.sleep(gap_s)  # the gap is the subject of the test
    assert sender.write(peer, *copies) < 3
    assert peer.digest(0, 8 * 188_416) == sender.digest(0, 8 * 188_416)


def test_thousands_of_tiny_transfers_use_few_connections(sender: Sender, start_peer: StartPeer) -> None:
    """CASES M02."""
    peer = start_peer()
    sender.write(peer, sender.copy(peer, 0, 0, 64))
    before = closing_connections()
    for index in range(2000):
        sender.write(peer, sender.copy(peer, 64 * index, 64 * index, 64))
    assert closing_connections() - before < 50
    established = [c for c in psutil.Process(peer.process.pid).net_connections("tcp") if c.status == "ESTABLISHED"]
    assert len(established) <= 16
    assert peer.digest(0, 128_000) == sender.digest(0, 128_000)


def closing_connections() -> int:
    """Connections of this machine in TIME_WAIT."""
    return sum(connection.status == "TIME_WAIT" for connection in psutil.net_connections("tcp"))


def test_a_rejected_address_fails_and_the_peer_stays_usable(sender: Sender, start_peer: StartPeer) -> None:
    peer = start_peer()
    with pytest.raises(TransferFailedError):
        sender.write(peer, sender.copy(peer, 0, SIZE - 100, 4096))
    sender.write(peer, sender.copy(peer, 0, 0, 4096))
    assert peer.digest(0, 4096) == sender.digest(0, 4096)
    assert peer.digest(SIZE - 100, 100) == hashlib.sha256(bytes(100)).hexdigest()


def test_unregistered_memory_is_never_sent(sender: Sender, start_peer: StartPeer) -> None:
    peer = start_peer(4096)
    with pytest.raises(InvalidRequestError, match="copy source"):
        sender.write(peer, sender.copy(peer, SIZE - 1, 0, 2))
    assert peer.digest(0, 4096) == hashlib.sha256(bytes(4096)).hexdigest()


def test_a_closed_port_fails_fast_and_drained(sender: Sender) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session_id = f"127.0.0.1:{unused.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(TransferFailedError, match="cannot be reached") as caught:
        sender.transport.write(session_id, [Copy(sender.address, 4096, 16)], start + 20)
    assert time.monotonic() - start < 1
    assert caught.value.drained


def test_a_peer_killed_in_the_middle_of_a_write_fails_it_soon(start_peer: StartPeer) -> None:
    """CASES M05, F01: no hang, no success; the restarted process is another session and works."""
    sender = Sender(1 << 26)
    peer = start_peer(1 << 26)
    whole = sender.copy(peer, 0, 0, 1 << 26)
    sender.write(peer, sender.copy(peer, 0, 0, 4096))

    def write_until_it_fails() -> tuple[TransferFailedError, float]:
        while True:
            start = time.monotonic()
            try:
                sender.write(peer, whole)
            except TransferFailedError as error:
                return error, time.monotonic() - start

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(write_until_it_fails)
        threading.Event().wait(0.1)
        peer.process.kill()
        error, seconds = failing.result(timeout=20)
    assert seconds < STALL_S + 2
    assert not error.drained
    start = time.monotonic()
    with pytest.raises(TransferFailedError, match="cannot be reached") as caught:
        sender.write(peer, whole)
    assert caught.value.drained
    assert time.monotonic() - start < 1
    restarted = start_peer()
    assert restarted.session_id != peer.session_id
    sender.write(restarted, sender.copy(restarted, 0, 0, 4096))
    assert restarted.digest(0, 4096) == sender.digest(0, 4096)
    sender.transport.close()


def test_a_frozen_peer_fails_in_time_stops_nobody_else_and_comes_back(sender: Sender, start_peer: StartPeer) -> None:
    frozen, other = start_peer(), start_peer()
    sender.write(frozen, sender.copy(frozen, 0, 0, 4096))
    sender.write(other, sender.copy(other, 0, 0, 4096))
    os.kill(frozen.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        stuck = pool.submit(sender.write, frozen, sender.copy(frozen, 0, 0, SIZE))
        slowest = max(sender.write(other, sender.copy(other, 0, 0, 4096)) for _ in range(20))
        error = stuck.exception(timeout=20)
        seconds = time.monotonic() - start
    assert isinstance(error, TransferFailedError)
    assert not error.drained
    assert seconds < STALL_S + 2
    assert slowest < 1
    os.kill(frozen.process.pid, signal.SIGCONT)
    sender.write(frozen, sender.copy(frozen, 0, 0, SIZE))
    assert frozen.digest(0, SIZE) == sender.digest(0, SIZE)


def write_in_the_end(sender: Sender, peer: MooncakePeer) -> float:
    """Seconds until a write worked; a contact that takes too long fails drained and may be tried again."""
    start = time.monotonic()
    while True:
        try:
            sender.write(peer, sender.copy(peer, 0, 0, 4096))
        except TransferFailedError as error:
            if not error.drained or time.monotonic() - start > WHILE_S:
                raise
        else:
            return time.monotonic() - start


def test_a_peer_frozen_before_first_contact_stops_nobody_else(sender: Sender, start_peer: StartPeer) -> None:
    """Left alone, the engine would hold up the writes to every peer for a minute. Nor does a port that takes calls and
    says nothing.
    """
    frozen, other = start_peer(), start_peer()
    os.kill(frozen.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as mute:
        stuck = pool.submit(sender.write, frozen, sender.copy(frozen, 0, 0, 4096))
        began = time.monotonic()
        copies = [sender.copy(other, 0, 0, 4096)]
        session_id = f"127.0.0.1:{mute.getsockname()[1]}"
        unanswered = pool.submit(sender.transport.write, session_id, copies, began + WHILE_S)
        # On a crowded machine a contact may take a while; held up by the engine it would take a minute.
        assert write_in_the_end(sender, other) < WHILE_S
        errors = [future.exception(timeout=WHILE_S) for future in (unanswered, stuck)]
        assert time.monotonic() - began < WHILE_S / 2
    for error in errors:
        assert isinstance(error, TransferFailedError)
        assert error.drained
    os.kill(frozen.process.pid, signal.SIGCONT)
    write_in_the_end(sender, frozen)
    assert frozen.digest(0, 4096) == sender.digest(0, 4096)
