"""Which engines a worker's process starts, and what a stage's port does with a peer that it cannot reach."""

import threading

import pytest
import torch

from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.pool_memory import shares_gpu_memory
from graftline.engine.transfer_port import Sending, StagePools
from graftline.errors import InvalidRequestError, PeerUnavailableError
from graftline.kv_transfer.in_process import InProcessHub
from graftline.kv_transfer.layout import StageLayout
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath
from graftline.proto.v1 import common_pb2
from graftline.worker import transfer
from graftline.worker.config import TransferConfig, TransferProtocol, TransportName
from graftline.worker.facts import encode_peer
from graftline.worker.transfer import PortFactory, mooncake_ways

INTRA, RDMA, TCP = TransferPath.INTRA_NODE_GPU, TransferPath.RDMA, TransferPath.TCP


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[MooncakeConfig]:
    """What engines were started with; the host has an RDMA device and a build for CUDA."""
    configs: list[MooncakeConfig] = []

    def start(config: MooncakeConfig) -> MooncakeConfig:
        configs.append(config)
        return config

    monkeypatch.setattr(transfer, "MooncakeTransport", start)
    monkeypatch.setattr(transfer, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(transfer, "installed_versions", lambda: {"mooncake-transfer-engine-cuda13": "0.3.14"})
    return configs


@pytest.mark.parametrize(
    ("config", "on_gpu", "paths"),
    [
        (TransferConfig(), True, [INTRA, RDMA, TCP]),
        (TransferConfig(), False, [RDMA, TCP]),
        (TransferConfig(intra_node_gpu=False), True, [RDMA, TCP]),
        (TransferConfig(protocol=TransferProtocol.TCP), True, [INTRA, TCP]),
        (TransferConfig(protocol=TransferProtocol.RDMA, rdma_devices="mlx5_0"), True, [INTRA, RDMA]),
    ],
)
def test_an_engine_for_every_way(
    started: list[MooncakeConfig], config: TransferConfig, on_gpu: bool, paths: list[TransferPath]
) -> None:
    assert list(mooncake_ways(config, on_gpu)) == paths
    assert [one.intra_node_nvlink for one in started] == [path is INTRA for path in paths]
    assert [one.protocol for one in started] == ["rdma" if path is RDMA else "tcp" for path in paths]


def test_expandable_segments_cannot_be_opened_by_peers(
    started: list[MooncakeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares_gpu_memory()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native, expandable_segments:True")
    assert list(mooncake_ways(TransferConfig(), True)) == [RDMA, TCP]


def test_a_way_that_does_not_start_is_left_out(started: list[MooncakeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: MooncakeConfig) -> MooncakeConfig:
        if config.protocol == "rdma" or config.intra_node_nvlink:
            raise PeerUnavailableError("no")
        return config

    monkeypatch.setattr(transfer, "MooncakeTransport", start)
    assert list(mooncake_ways(TransferConfig(), True)) == [TCP]
    with pytest.raises(PeerUnavailableError):
        mooncake_ways(TransferConfig(protocol=TransferProtocol.RDMA), False)


def test_rdma_devices_need_rdma() -> None:
    with pytest.raises(InvalidRequestError, match="mlx5_0"):
        mooncake_ways(TransferConfig(protocol=TransferProtocol.TCP, rdma_devices="mlx5_0"), False)


@pytest.mark.parametrize("had_a_way", [False, True])
def test_orders_to_a_peer_without_a_way_are_answered_with_that(had_a_way: bool) -> None:
    """The stage lives on: whoever paired it should have refused, but no order may end it or go an earlier way."""
    port = PortFactory(TransferConfig(transport=TransportName.IN_PROCESS), InProcessHub())(0)
    pool = KvPool(KvGeometry(1, 4, 1, 8, torch.float32), 4, layers=(0,))
    own = StageLayout.from_proto(common_pb2.StageLayout.FromString(port.open(StagePools(0, pool, None))))
    assert [endpoint.path for endpoint in own.endpoints] == [TCP]
    assert own.host_id
    peer = StageLayout(0, "peer:1", own.buffers, own.host_id, (Endpoint(RDMA, "peer:1"),))
    if had_a_way:
        port.pair("peer", encode_peer([own.to_proto()]))
    port.pair("peer", encode_peer([peer.to_proto()]))
    answers: list[SendDone] = []
    order = SendOrder(7, "owner", "peer", 0, SentPool.TARGET, [(0, 0, 1)])
    port.send([Sending(order, lambda timeout_s: True, answers.append)])
    assert answers[0].order == 7
    assert "reached by rdma" in answers[0].error
    assert answers[0].drained
    port.forget("peer")
    port.close()


def test_orders_given_together_are_answered_each_by_itself() -> None:
    """Of four, one is to a stranger, one has nothing to send, one names a page that the peer does not have."""
    port = PortFactory(TransferConfig(transport=TransportName.IN_PROCESS), InProcessHub())(0)
    pool = KvPool(KvGeometry(1, 4, 1, 8, torch.float32), 4, layers=(0,))
    pool.data[0].fill_(7.0)
    own = common_pb2.StageLayout.FromString(port.open(StagePools(0, pool, None)))
    port.pair("peer", encode_peer([own]))
    answers: dict[int, SendDone] = {}
    answered = threading.Semaphore(0)

    def done(answer: SendDone) -> None:
        answers[answer.order] = answer
        answered.release()

    orders = [
        SendOrder(1, "owner", "peer", 0, SentPool.TARGET, [(0, 1, 1)]),
        SendOrder(2, "owner", "stranger", 0, SentPool.TARGET, [(0, 2, 1)]),
        SendOrder(3, "owner", "peer", 0, SentPool.TARGET, []),
        SendOrder(4, "owner", "peer", 0, SentPool.TARGET, [(0, 9, 1)]),
        SendOrder(5, "owner", "peer", 0, SentPool.TARGET, [(0, 3, 1)]),
    ]
    port.send([Sending(order, lambda timeout_s: True, done) for order in orders])
    for _ in orders:
        assert answered.acquire(timeout=10)
    assert {number: bool(answer.error) for number, answer in answers.items()} == {
        1: False,
        2: True,
        3: False,
        4: True,
        5: False,
    }
    assert all(answer.drained for answer in answers.values())
    assert "not paired" in answers[2].error
    assert "destination units" in answers[4].error
    assert [answers[number].num_bytes for number in (1, 3, 5)] == [
        pool.geometry.page_bytes,
        0,
        pool.geometry.page_bytes,
    ]
    assert [bool((pool.data[page] == 7.0).all()) for page in range(4)] == [True, True, False, True]
    port.close()
