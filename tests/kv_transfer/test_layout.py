import pytest

from graftline.errors import InvalidRequestError
from graftline.kv_transfer.layout import (
    PAGE_KINDS,
    SLOT_KINDS,
    BufferKey,
    BufferKind,
    BufferLayout,
    StageLayout,
    WorkerLayout,
)
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath
from graftline.proto.v1 import common_pb2

K0, V0, K1 = BufferKey(BufferKind.K, 0), BufferKey(BufferKind.V, 0), BufferKey(BufferKind.K, 1)


def buffer(
    key: BufferKey = K0, base: int = 4096, unit: int = 64, stride: int = 128, num_units: int = 8
) -> BufferLayout:
    return BufferLayout(key, "bfloat16", base, unit, stride, num_units)


def test_every_kind_has_pages_or_slots() -> None:
    assert set(BufferKind) == PAGE_KINDS | SLOT_KINDS
    assert {BufferKind.CONV, BufferKind.SSM} == SLOT_KINDS
    assert not PAGE_KINDS & SLOT_KINDS


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": 0}, "base_address"),
        ({"base": -4}, "base_address"),
        ({"unit": 0}, "unit_bytes"),
        ({"unit": 129}, "unit_stride_bytes"),
        ({"num_units": 0}, "num_units"),
        ({"base": (1 << 64) - 64}, "end address"),
        ({"key": BufferKey(BufferKind.V, -1)}, "layer"),
    ],
)
def test_impossible_buffers_are_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        buffer(**change)  # type: ignore[arg-type]


def test_unit_addresses_step_by_the_stride() -> None:
    layout = buffer(base=1000, unit=10, stride=16, num_units=4)
    assert [layout.unit_address(index) for index in range(4)] == [1000, 1016, 1032, 1048]
    assert layout.end_address == 1058
    with pytest.raises(AssertionError, match="outside"):
        layout.unit_address(4)


def test_stage_survives_the_wire() -> None:
    ways = (Endpoint(TransferPath.INTRA_NODE_GPU, "host:15001"), Endpoint(TransferPath.TCP, "host:15000"))
    stage = StageLayout(2, "host:15000", (buffer(), buffer(V0, base=4160)), "boot/1", ways)
    message = common_pb2.StageLayout.FromString(stage.to_proto().SerializeToString())
    assert StageLayout.from_proto(message) == stage


def test_an_unknown_kind_from_a_peer_is_refused() -> None:
    message = buffer().to_proto()
    message.kind = "kv"
    with pytest.raises(InvalidRequestError, match="'kv' is unknown"):
        BufferLayout.from_proto(message)


@pytest.mark.parametrize(
    ("stage", "session_id", "buffers", "problem"),
    [
        (-1, "a:1", (buffer(),), "negative"),
        (0, "", (buffer(),), "session_id"),
        (0, "a:1", (), "buffers"),
        (0, "a:1", (buffer(), buffer(base=1 << 20)), r"repeat k\[0\]"),
        (0, "a:1", (buffer(), buffer(V0, base=4096 + 63)), "share bytes"),
        (0, "a:1", (buffer(), buffer(V0, base=4096 + 64, stride=256)), "share bytes"),
        (0, "a:1", (buffer(), buffer(V0, base=4096 + 65)), "share bytes"),
    ],
)
def test_impossible_stages_are_refused(
    stage: int, session_id: str, buffers: tuple[BufferLayout, ...], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        StageLayout(stage, session_id, buffers)


def test_interleaved_entries_and_separate_pools_are_fine() -> None:
    entries = (buffer(), buffer(V0, base=4096 + 64), buffer(K1, base=4096 + 8 * 128))
    assert StageLayout(0, "a:1", entries).buffers == entries


def test_a_worker_orders_its_stages_and_finds_keys() -> None:
    first, second = StageLayout(0, "a:1", (buffer(),)), StageLayout(1, "a:2", (buffer(V0),))
    worker = WorkerLayout.from_proto([second.to_proto(), first.to_proto()])
    assert worker.stages == (first, second)
    assert worker.session_ids == ("a:1", "a:2")
    assert worker.by_key()[V0] == (second, second.buffers[0])
    assert worker.missing([K1, V0, K0]) == (K1,)


def test_a_key_on_two_stages_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"k\[0\] more than once"):
        WorkerLayout.from_stages([StageLayout(0, "a:1", (buffer(),)), StageLayout(1, "a:2", (buffer(),))])


@pytest.mark.parametrize("numbers", [(), (1,), (0, 0), (0, 2)])
def test_stage_numbers_have_no_holes(numbers: tuple[int, ...]) -> None:
    keys = (K0, V0)
    stages = [StageLayout(number, "a:1", (buffer(key),)) for number, key in zip(numbers, keys, strict=False)]
    with pytest.raises(InvalidRequestError, match="numbered"):
        WorkerLayout.from_stages(stages)
