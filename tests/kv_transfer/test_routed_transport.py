"""Several ways in one process: who is written to by which, and what happens when there is none."""

import pytest

from graftline.errors import IncompatibleError, PeerUnavailableError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout, WorkerLayout
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath
from graftline.kv_transfer.routed_transport import RoutedTransport, require_reachable
from graftline.kv_transfer.transport import Transport

INTRA, RDMA, TCP = TransferPath.INTRA_NODE_GPU, TransferPath.RDMA, TransferPath.TCP


class Way:
    """Notes what it is asked to do."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        self.session_id = f"{name}:1"
        self.refuses = refuses
        self.regions: list[int] = []
        self.written: list[str] = []
        self.forgotten: list[str] = []
        self.closed = False

    def register(self, address: int, num_bytes: int) -> None:
        if self.refuses:
            raise PeerUnavailableError("no device memory")
        self.regions.append(address)

    def write(self, session_id: str, copies: list[Copy], deadline_s: float) -> None:
        self.written.append(session_id)

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def close(self) -> None:
        self.closed = True


def stage(number: int, host: str, *paths: TransferPath) -> StageLayout:
    kind = BufferKind.K if number == 0 else BufferKind.V
    buffer = BufferLayout(BufferKey(kind, 0), "float32", 4096, 64, 64, 4)
    endpoints = tuple(Endpoint(path, f"{path.value}-{number}:1") for path in paths)
    return StageLayout(number, f"main-{number}:1", (buffer,), host, endpoints)


def routed(**ways: Way) -> RoutedTransport:
    return RoutedTransport({TransferPath[name]: way for name, way in ways.items()}, "here")  # type: ignore[misc]


def test_every_stage_of_a_peer_is_written_to_by_its_own_way() -> None:
    intra, tcp = Way("intra"), Way("tcp")
    transport: Transport = routed(INTRA_NODE_GPU=intra, TCP=tcp)
    assert transport.session_id == "tcp:1"
    transport.register(4096, 64)
    assert intra.regions == tcp.regions == [4096]
    peer = WorkerLayout((stage(0, "here", INTRA, TCP), stage(1, "there", INTRA, TCP)))
    assert isinstance(transport, RoutedTransport)
    assert transport.endpoints == (Endpoint(INTRA, "intra:1"), Endpoint(TCP, "tcp:1"))
    reached = transport.reached(peer)
    assert [layout.session_id for layout in reached.stages] == ["intra-node-gpu-0:1", "tcp-1:1"]
    for layout in reached.stages:
        transport.write(layout.session_id, [], 0.0)
    assert (intra.written, tcp.written) == (["intra-node-gpu-0:1"], ["tcp-1:1"])
    for layout in reached.stages:
        transport.forget(layout.session_id)
    assert (intra.forgotten, tcp.forgotten) == (["intra-node-gpu-0:1"], ["tcp-0:1", "tcp-1:1"])
    transport.close()
    assert intra.closed
    assert tcp.closed


def test_a_peer_that_names_no_ways_is_written_to_at_its_session() -> None:
    tcp = Way("tcp")
    transport = routed(INTRA_NODE_GPU=Way("intra"), TCP=tcp)
    reached = transport.reached(WorkerLayout((stage(0, "here"),)))
    assert reached.stages[0].session_id == "main-0:1"
    transport.write("main-0:1", [], 0.0)
    assert tcp.written == ["main-0:1"]


def test_a_way_that_cannot_take_the_pools_is_given_up() -> None:
    intra, tcp = Way("intra", refuses=True), Way("tcp")
    transport = routed(INTRA_NODE_GPU=intra, TCP=tcp)
    transport.register(4096, 64)
    assert intra.closed
    assert transport.endpoints == (Endpoint(TCP, "tcp:1"),)
    with pytest.raises(PeerUnavailableError):
        routed(TCP=Way("tcp", refuses=True)).register(4096, 64)


def test_workers_without_a_common_way_are_not_paired() -> None:
    """It is refused when they pair, with both sides named; not when the first write fails."""
    ours, theirs = (WorkerLayout((stage(0, "here", path),)) for path in (RDMA, TCP))
    with pytest.raises(IncompatibleError, match="stage 0 is reached by tcp, the source has rdma") as raised:
        require_reachable(ours, theirs)
    assert raised.value.fields == ("transfer_protocol",)
    require_reachable(ours, WorkerLayout((stage(0, "there", RDMA, TCP),)))
    require_reachable(WorkerLayout((stage(0, "here"),)), theirs)
    with pytest.raises(IncompatibleError):
        routed(RDMA=Way("rdma")).reached(theirs)
