"""Ways that both ends offer and that do not work: writes go by the next one."""

import logging
import time
from collections.abc import Sequence

import pytest

from graftline.errors import GraftlineError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout, WorkerLayout
from graftline.kv_transfer.peer_route import PeerRoute
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath
from graftline.kv_transfer.routed_transport import RoutedTransport
from graftline.kv_transfer.transport import GroupedWrite, OneByOne, Refused, WriteGroup

INTRA, RDMA, TCP = TransferPath.INTRA_NODE_GPU, TransferPath.RDMA, TransferPath.TCP
COPY = Copy(4096, 8192, 64)


class Road:
    """A transport that fails as told."""

    def __init__(self, name: str) -> None:
        self.session_id = f"{name}:1"
        self.failure: dict[str, bool] = {}  # by session: whether refused
        self.tried: list[str] = []
        self.arrived: list[tuple[str, Copy]] = []
        self.forgotten: list[str] = []

    def register(self, address: int, num_bytes: int) -> None:
        return

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        self.tried.append(session_id)
        if session_id in self.failure:
            refused = self.failure[session_id]
            raise TransferFailedError(f"{self.session_id} failed", drained=refused, refused=refused)
        self.arrived += [(session_id, copy) for copy in copies]

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        return OneByOne(self.write, session_id, writes, refused)

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def close(self) -> None:
        return


class Write:
    """A `GroupedWrite` that must start and end once."""

    def __init__(self, copies: Sequence[Copy] | None = (COPY,)) -> None:
        self.deadline_s = time.monotonic() + 10
        self.starts = 0
        self.ends: list[GraftlineError | None] = []
        self._copies = copies

    def start(self) -> Sequence[Copy] | None:
        self.starts += 1
        return self._copies

    def end(self, error: GraftlineError | None, seconds: float) -> None:
        self.ends.append(error)


class Roads:
    """A process with three ways, and peers on its host that have them too."""

    def __init__(self) -> None:
        self.intra, self.rdma, self.tcp = Road("intra"), Road("rdma"), Road("tcp")
        self.transport = RoutedTransport({INTRA: self.intra, RDMA: self.rdma, TCP: self.tcp}, "here")

    def reach(self, peer: int) -> str:
        """Pairs with a peer; under which name it is written to."""
        buffer = BufferLayout(BufferKey(BufferKind.K, 0), "float32", 4096, 64, 64, 4)
        endpoints = tuple(Endpoint(path, f"{path.value}-{peer}:1") for path in (INTRA, RDMA, TCP))
        layout = StageLayout(0, f"main-{peer}:1", (buffer,), "here", endpoints)
        return self.transport.reached(WorkerLayout((layout,))).stages[0].session_id

    def give(self, session_id: str, *writes: Write) -> bool:
        """Whether submitting them was enough."""
        group = self.transport.begin(session_id, writes)
        if group.advance(time.monotonic() + 10):
            return True
        group.finish()
        return False


def ended(*writes: Write) -> bool:
    return all((write.starts, write.ends) == (1, [None]) for write in writes)


@pytest.mark.parametrize("in_group", [True, False])
def test_a_refused_write_goes_by_the_next_way_and_so_do_all_later_ones(
    in_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    roads = Roads()
    session = roads.reach(1)
    roads.intra.failure[session] = True
    writes = [Write(), Write()]

    def give() -> None:
        if in_group:
            roads.give(session, *writes)
        else:
            roads.transport.write(session, [COPY], time.monotonic() + 10)

    with caplog.at_level(logging.WARNING):
        give()
    count = 2 if in_group else 1
    assert roads.rdma.arrived == [("rdma-1:1", COPY)] * count
    assert ended(*writes) or not in_group
    assert [record.getMessage() for record in caplog.records] == [
        "stage 0 of a peer is written to by rdma from now on: intra-node-gpu does not work: intra:1 failed"
    ]
    tried = len(roads.intra.tried)
    writes = [Write(), Write()]
    give()
    assert len(roads.intra.tried) == tried, "a way that does not work is not tried again"
    assert len(roads.rdma.arrived) == 2 * count


def test_ways_are_given_up_one_after_the_other() -> None:
    roads, write = Roads(), Write()
    session = roads.reach(1)
    roads.intra.failure[session] = roads.rdma.failure["rdma-1:1"] = True
    roads.give(session, write)
    assert roads.tcp.arrived == [("tcp-1:1", COPY)]
    assert ended(write)


def test_the_last_way_is_not_given_up() -> None:
    roads, write = Roads(), Write()
    session = roads.reach(1)
    roads.intra.failure[session] = roads.rdma.failure["rdma-1:1"] = roads.tcp.failure["tcp-1:1"] = True
    roads.give(session, write)
    assert [str(error) for error in write.ends] == ["tcp:1 failed"]
    with pytest.raises(TransferFailedError, match="tcp:1"):
        roads.transport.write(session, [COPY], time.monotonic() + 10)
    del roads.tcp.failure["tcp-1:1"]
    again = Write()
    roads.give(session, again)
    assert ended(again)


def test_a_write_that_was_taken_and_failed_is_not_written_twice() -> None:
    """Its bytes may still land, and nobody would wait for them if another way had brought them."""
    roads, write = Roads(), Write()
    session = roads.reach(1)
    roads.intra.failure[session] = False
    roads.give(session, write)
    assert [str(error) for error in write.ends] == ["intra:1 failed"]
    assert not roads.rdma.tried
    with pytest.raises(TransferFailedError, match="intra:1"):
        roads.transport.write(session, [COPY], time.monotonic() + 10)


def test_other_peers_keep_their_way_and_a_new_one_starts_anew() -> None:
    roads = Roads()
    first, second = roads.reach(1), roads.reach(2)
    roads.intra.failure[first] = True
    roads.give(first, Write())
    roads.give(second, Write())
    assert roads.intra.arrived == [(second, COPY)]
    roads.transport.forget(first)
    assert roads.intra.forgotten == [first]
    assert (roads.rdma.forgotten, roads.tcp.forgotten) == (["rdma-1:1"], ["tcp-1:1"])
    del roads.intra.failure[first]
    roads.give(roads.reach(1), Write())
    assert roads.intra.arrived[-1] == (first, COPY)


def test_writes_that_are_no_longer_wanted_stay_unwritten() -> None:
    roads, wanted, dropped = Roads(), Write(), Write(None)
    session = roads.reach(1)
    roads.intra.failure[session] = True
    roads.give(session, dropped, wanted)
    assert ended(wanted)
    assert (dropped.starts, dropped.ends) == (1, [])


def test_whoever_gives_a_way_up_late_finds_the_next_one() -> None:
    """Two groups may be under way when it turns out."""
    roads = Roads()
    session = roads.reach(1)
    route: PeerRoute = roads.transport._route_to(session)
    way, error = route.way, TransferFailedError("no", refused=True)
    assert route.give_up(way, error)
    assert route.way.path is RDMA
    assert route.give_up(way, error)
    assert route.way.path is RDMA
