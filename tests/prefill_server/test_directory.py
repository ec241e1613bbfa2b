"""Which decodes may be written to."""

import pytest

from graftline.errors import IncompatibleError, InvalidRequestError
from graftline.prefill_server.directory import EngineDirectory
from graftline.proto.v1 import common_pb2
from graftline.worker.facts import decode_peer


class Engine:
    def __init__(self) -> None:
        self.paired: dict[str, bytes] = {}
        self.forgotten: list[str] = []

    def pair(self, peer: str, layout: bytes) -> None:
        self.paired[peer] = layout

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


def layout(*layers: int, stage: int = 0, dtype: str = "float32") -> common_pb2.StageLayout:
    buffers = [
        common_pb2.BufferLayout(
            kind="k",
            layer=layer,
            dtype=dtype,
            base_address=4096 * (layer + 1),
            unit_bytes=64,
            unit_stride_bytes=64,
            num_units=8,
        )
        for layer in layers
    ]
    return common_pb2.StageLayout(stage=stage, session_id=f"host:{stage + 1}", buffers=buffers)


def decode(incarnation: str, address: str = "decode:1") -> common_pb2.WorkerIdentity:
    return common_pb2.WorkerIdentity(incarnation=incarnation, address=address)


def test_layouts_reach_the_engine() -> None:
    engine = Engine()
    directory = EngineDirectory(engine, [layout(0, 1)], max_peers=2)
    stages = [layout(0), layout(1, stage=1)]
    directory.pair(decode("d1"), stages)
    assert directory.is_paired("d1")
    assert decode_peer(engine.paired["d1"]) == stages


def test_a_restarted_decode_replaces_its_former_self() -> None:
    """CASES F01, the other way round."""
    engine = Engine()
    directory = EngineDirectory(engine, [layout(0)], max_peers=9)
    directory.pair(decode("d1"), [layout(0)])
    directory.pair(decode("d2"), [layout(0)])
    assert engine.forgotten == ["d1"]
    assert not directory.is_paired("d1")
    directory.pair(decode("d2"), [layout(0)])
    assert engine.forgotten == ["d1"]


def test_peers_are_bounded() -> None:
    engine = Engine()
    directory = EngineDirectory(engine, [layout(0)], max_peers=2)
    for number in range(4):
        directory.pair(decode(f"d{number}", f"decode:{number + 1}"), [layout(0)])
    assert engine.forgotten == ["d0", "d1"]
    assert directory.is_paired("d3")


@pytest.mark.parametrize("stages", [[layout(0)], [layout(0, 1, 2)], [layout(0, 1, dtype="bfloat16")]])
def test_layouts_that_do_not_match_are_refused(stages: list[common_pb2.StageLayout]) -> None:
    engine = Engine()
    directory = EngineDirectory(engine, [layout(0, 1)], max_peers=2)
    with pytest.raises(IncompatibleError):
        directory.pair(decode("d1"), stages)
    assert engine.paired == {}


def test_nonsense_is_refused() -> None:
    directory = EngineDirectory(Engine(), [layout(0)], max_peers=2)
    with pytest.raises(InvalidRequestError, match="address"):
        directory.pair(decode("d1", ""), [layout(0)])
    with pytest.raises(InvalidRequestError):
        directory.pair(decode("d1"), [])
