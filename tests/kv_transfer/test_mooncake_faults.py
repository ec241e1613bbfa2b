"""What the transport makes of every answer the engine can give. The engine here is a scripted stand-in."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
from scripted_engine import ScriptedEngine

from graftline.errors import InvalidRequestError, PeerUnavailableError, TransferFailedError
from graftline.kv_transfer import mooncake_engine, mooncake_group
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import MooncakeConfig, has_intra_node, intra_node_config, start_engine
from graftline.kv_transfer.mooncake_transport import MooncakeTransport

BASE, SIZE = 0x10000, 0x10000
PEER = "10.0.0.1:15001"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def transport_over(engine: ScriptedEngine, stall_timeout_s: int = 1, max_in_flight: int = 4) -> MooncakeTransport:
    config = MooncakeConfig("10.0.0.2", stall_timeout_s=stall_timeout_s, max_in_flight=max_in_flight)
    transport = MooncakeTransport(config, lambda _: engine)
    transport.register(BASE, SIZE)
    return transport


def copies(count: int) -> list[Copy]:
    return [Copy(BASE + 16 * index, 0x90000 + 16 * index, 16) for index in range(count)]


def abandon(transport: MooncakeTransport, engine: ScriptedEngine) -> None:
    """A write whose two copies are still under way when it has failed."""
    engine.status = lambda target, address, looks: 0
    with pytest.raises(TransferFailedError):
        transport.write(PEER, copies(2), in_s(0.3))
    assert len(engine.under_way) == 2


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_many_copies_stay_within_the_bound_and_all_are_submitted_once(engine: ScriptedEngine) -> None:
    transport_over(engine).write(PEER, copies(23), in_s(5))
    assert engine.most_under_way == 4
    assert engine.submitted == [(PEER, copy.src_address) for copy in copies(23)]


def test_copies_that_end_together_make_batches(engine: ScriptedEngine) -> None:
    """On the intra-node way: every copy is handed over once, and a failed batch has failed with all its copies."""
    config = MooncakeConfig("10.0.0.2", copies_per_batch=5, intra_node_nvlink=True, spin_s=0.001)
    transport = MooncakeTransport(config, lambda _: engine)
    transport.register(BASE, SIZE)
    transport.write(PEER, copies(11), in_s(5))
    assert [len(batch) for batch in engine.batches] == [5, 5]
    last = (copies(11)[10].src_address, copies(11)[10].dst_address, 16)
    assert [*engine.batches[0], *engine.batches[1], last] == [tuple(copy) for copy in copies(11)]
    assert engine.submitted[-1] == (PEER, last[0])
    engine.status = lambda target, address, looks: -1
    with pytest.raises(TransferFailedError, match="11 copies"):
        transport.write(PEER, copies(11), in_s(5))


def test_a_session_that_comes_back_is_a_new_peer(engine: ScriptedEngine) -> None:
    """A restarted process may get the old one's port; the engine must shake hands with it again."""
    transport = transport_over(engine)
    transport.write(PEER, copies(1), in_s(5))
    transport.forget(PEER)
    transport.write(PEER, copies(1), in_s(5))
    transport.forget(PEER)
    transport.write(PEER, copies(1), in_s(5))
    assert [target for target, _ in engine.submitted] == [PEER, "10.0.0.1:015001", "10.0.0.1:0015001"]
    assert engine.probes == [PEER] * 3


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 8192, 10_000])
def test_long_copies_are_cut_into_pieces_that_cover_every_byte_once(engine: ScriptedEngine, num_bytes: int) -> None:
    transport = MooncakeTransport(MooncakeConfig("10.0.0.2", max_copy_bytes=4096), lambda _: engine)
    transport.register(BASE, SIZE)
    transport.write(PEER, [Copy(BASE, 0x90000, num_bytes)], in_s(5))
    covered = [address + offset for address, dst, length in engine.pieces for offset in range(length)]
    assert covered == list(range(BASE, BASE + num_bytes))
    assert all(dst - address == 0x90000 - BASE and length <= 4096 for address, dst, length in engine.pieces)


@pytest.mark.parametrize("status", [-1, -2, 2, 5, 99, -(1 << 31)])
def test_every_status_but_done_is_a_failure(engine: ScriptedEngine, status: int) -> None:
    """CASES M05."""
    engine.status = lambda target, address, looks: status
    with pytest.raises(TransferFailedError, match="2 copies") as caught:
        transport_over(engine).write(PEER, copies(2), in_s(5))
    assert not caught.value.drained
    assert not engine.under_way


@pytest.mark.parametrize("answer", [0, -1, (1 << 64) - 1])
def test_a_refused_submit_is_drained_and_never_asked_about(engine: ScriptedEngine, answer: int) -> None:
    engine.submit = lambda target, address: answer
    with pytest.raises(TransferFailedError) as caught:
        transport_over(engine).write(PEER, copies(3), in_s(5))
    assert caught.value.drained
    assert not engine.looks


def test_a_submit_refused_half_way_is_not_drained(engine: ScriptedEngine) -> None:
    engine.submit = lambda target, address: 0 if address == BASE + 32 else None
    with pytest.raises(TransferFailedError) as caught:
        transport_over(engine).write(PEER, copies(3), in_s(5))
    assert not caught.value.drained


def test_a_write_that_never_ends_fails_at_its_deadline(engine: ScriptedEngine) -> None:
    """CASES M06."""
    engine.status = lambda target, address, looks: 0
    transport = transport_over(engine)
    start = time.monotonic()
    with pytest.raises(TransferFailedError, match="not acknowledged in time") as caught:
        transport.write(PEER, copies(9), start + 0.3)
    assert 0.3 <= time.monotonic() - start < 2
    assert not caught.value.drained
    assert len(engine.submitted) == 4, "nothing is sent or retried after the deadline"


def test_nothing_is_submitted_after_the_deadline(engine: ScriptedEngine) -> None:
    """CASES B01: a process that was stopped for long must not go on writing where it no longer may."""
    deadline_s = in_s(0.3)
    engine.status = lambda target, address, looks: int(time.monotonic() >= deadline_s)
    with pytest.raises(TransferFailedError):
        transport_over(engine).write(PEER, copies(9), deadline_s)
    assert len(engine.submitted) == 4
    with pytest.raises(TransferFailedError) as caught:
        transport_over(engine).write(PEER, copies(9), deadline_s)
    assert caught.value.drained
    assert len(engine.submitted) == 4


def test_batches_given_up_on_are_freed_by_a_later_write(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    abandon(transport, engine)
    engine.status = lambda target, address, looks: 1
    transport.write(PEER, copies(1), in_s(5))
    assert not engine.under_way


def test_a_quick_failure_is_retried_once_under_another_spelling_and_only_what_failed(engine: ScriptedEngine) -> None:
    """CASES M01: the engine shakes hands again, because it takes the second spelling for another peer."""
    engine.status = lambda target, address, looks: -1 if target == PEER and address >= BASE + 32 else 1
    transport_over(engine).write(PEER, copies(4), in_s(5))
    retried = [submitted for submitted in engine.submitted if submitted[0] != PEER]
    assert [address for _, address in retried] == [BASE + 32, BASE + 48]
    assert {target for target, _ in retried} == {"10.0.0.1:015001"}
    assert engine.probes == [PEER, PEER]


def test_later_writes_keep_the_spelling_that_worked(engine: ScriptedEngine) -> None:
    engine.status = lambda target, address, looks: -1 if target == PEER else 1
    transport = transport_over(engine)
    for _ in range(3):
        transport.write(PEER, copies(1), in_s(5))
    assert [target for target, _ in engine.submitted] == [PEER, *["10.0.0.1:015001"] * 3]


def test_a_slow_failure_is_not_retried(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late bytes of the first try could land after the second had succeeded."""
    monkeypatch.setattr(mooncake_group, "_QUICK_FAILURE_S", 0.0)
    engine.status = lambda target, address, looks: -1
    with pytest.raises(TransferFailedError):
        transport_over(engine).write(PEER, copies(1), in_s(5))
    assert len(engine.submitted) == 1


def test_a_peer_that_died_is_not_written_to_again(engine: ScriptedEngine) -> None:
    engine.status = lambda target, address, looks: -1
    codes = iter([0, -102, -102])
    engine.probe = lambda session_id: next(codes)
    transport = transport_over(engine)
    with pytest.raises(TransferFailedError) as first:
        transport.write(PEER, copies(1), in_s(5))
    assert not first.value.drained
    with pytest.raises(TransferFailedError, match=r"cannot be reached \(-102\)") as second:
        transport.write(PEER, copies(1), in_s(5))
    assert second.value.drained
    assert len(engine.submitted) == 1


def test_a_silent_peer_is_not_contacted_and_stops_nobody_else(engine: ScriptedEngine) -> None:
    answer = threading.Event()
    engine.probe = lambda session_id: 0 if session_id != PEER or answer.wait(20) else -1
    transport = transport_over(engine)
    for _ in range(3):
        with pytest.raises(TransferFailedError, match="did not answer") as caught:
            transport.write(PEER, copies(1), in_s(0.05))
        assert caught.value.drained
    transport.write("10.0.0.3:15001", copies(1), in_s(5))
    assert engine.probes.count(PEER) == 1, "one question at a time"
    assert {target for target, _ in engine.submitted} == {"10.0.0.3:15001"}
    answer.set()
    transport.write(PEER, copies(1), in_s(5))


def test_a_stuck_write_stops_only_its_own_peer(engine: ScriptedEngine) -> None:
    stuck, release = threading.Event(), threading.Event()

    def status(target: str, address: int, looks: int) -> int:
        if target == PEER:
            stuck.set()
            return int(release.is_set())
        return 1

    engine.status = status
    transport = transport_over(engine)
    writer = threading.Thread(target=transport.write, args=(PEER, copies(1), in_s(20)))
    writer.start()
    assert stuck.wait(10)
    transport.write("10.0.0.3:15001", copies(1), in_s(5))
    with pytest.raises(TransferFailedError, match="busy") as caught:
        transport.write(PEER, copies(1), in_s(0.05))
    assert caught.value.drained
    release.set()
    writer.join(10)
    assert not writer.is_alive()


def test_unregistered_sources_never_reach_the_engine(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    for bad in (Copy(BASE - 1, 0x90000, 2), Copy(BASE + SIZE - 1, 0x90000, 2), Copy(BASE, 0x90000, 0)):
        with pytest.raises(InvalidRequestError, match="copy source"):
            transport.write(PEER, [*copies(1), bad], in_s(5))
    assert not engine.submitted
    assert not engine.probes


@pytest.mark.parametrize("session_id", ["", "host", "host:", ":15000", "host:0", "host:65536", "host:x", "host:-1"])
def test_what_is_no_session_id_never_reaches_the_engine(engine: ScriptedEngine, session_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="session id"):
        transport_over(engine).write(session_id, copies(1), in_s(5))
    assert not engine.probes


def test_a_region_the_engine_refuses_is_an_error(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    engine.register_code = -600
    with pytest.raises(PeerUnavailableError, match="-600"):
        transport.register(BASE + SIZE, 16)


def test_close_waits_for_abandoned_batches_and_then_unregisters(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    abandon(transport, engine)
    engine.looks.clear()
    engine.status = lambda target, address, looks: int(looks > 20)
    transport.close()
    transport.close()
    assert not engine.under_way
    assert engine.unregistered == [BASE]
    with pytest.raises(TransferFailedError, match="closed") as caught:
        transport.write(PEER, copies(1), in_s(5))
    assert caught.value.drained


def test_close_keeps_memory_registered_that_the_engine_may_still_read(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    abandon(transport, engine)
    transport.close()
    assert engine.unregistered == []


def test_forgetting_a_peer_frees_its_ended_batches(engine: ScriptedEngine) -> None:
    transport = transport_over(engine)
    abandon(transport, engine)
    engine.status = lambda target, address, looks: 1
    transport.forget(PEER)
    transport.forget("10.0.0.9:1")
    assert not engine.under_way


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"host": "0.0.0.0"}, "wildcard"),
        ({"host": "::"}, "wildcard"),
        ({"host": "[::]"}, "wildcard"),
        ({"host": ""}, "wildcard"),
        ({"host": "*"}, "wildcard"),
        ({"protocol": "nvlink_intra"}, "protocol"),
        ({"device": "mlx5_0"}, "device"),
        ({"copies_per_batch": 2}, "copies_per_batch"),
        ({"spin_s": -1.0}, "spin_s"),
        ({"stall_timeout_s": 0}, "stall_timeout_s"),
        ({"contact_timeout_s": 0.0}, "contact_timeout_s"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_copy_bytes": 1}, "max_copy_bytes"),
        ({"min_port": 80}, "min_port"),
        ({"min_port": 17000}, "min_port"),
    ],
)
def test_impossible_settings_are_refused_by_field(change: dict[str, object], field: str) -> None:
    """CASES D01: a wildcard is nothing that peers could reach."""
    with pytest.raises(InvalidRequestError, match=field):
        MooncakeConfig(**{"host": "10.0.0.1", **change})  # type: ignore[arg-type]


def test_an_environment_without_acknowledgements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(InvalidRequestError, match="acknowledgements"):
        start_engine(MooncakeConfig("127.0.0.1"))


@pytest.mark.parametrize(
    ("version", "fine"),
    [("0.3.12", False), ("0.3.13", False), ("0.3.13.post1", True), ("0.3.14", True), ("0.4.0rc1", True), ("1.0", True)],
)
def test_an_engine_too_old_to_acknowledge_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, fine: bool) -> None:
    monkeypatch.setattr(mooncake_engine, "installed_versions", lambda: {"mooncake-transfer-engine": version})
    loaded: list[str] = []

    def load(name: str) -> None:
        loaded.append(name)
        raise ImportError(name)

    monkeypatch.setattr(mooncake_engine.importlib, "import_module", load)
    with pytest.raises(PeerUnavailableError if fine else InvalidRequestError):
        start_engine(MooncakeConfig("127.0.0.1"))
    assert bool(loaded) == fine


def test_settings_reach_the_engine_as_environment() -> None:
    environment = MooncakeConfig("10.0.0.1", stall_timeout_s=7, intra_node_nvlink=True).environment()
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == environment["MC_TCP_STATUS_TIMEOUT_SEC"] == "7"
    assert environment["MC_INTRANODE_NVLINK"] == "1"
    assert "MC_INTRANODE_NVLINK" not in MooncakeConfig("10.0.0.1").environment()
    assert intra_node_config("10.0.0.1").environment()["MC_INTRANODE_NVLINK"] == "1"
    assert [
        host
        for host in ("::1", "[fd00::2]", "10.0.0.1", "a.example")
        if "MC_USE_IPV6" in MooncakeConfig(host).environment()
    ] == ["::1", "[fd00::2]"]
    assert has_intra_node({"mooncake-transfer-engine-cuda13": "0.3.14"})
    assert not has_intra_node({"mooncake-transfer-engine-non-cuda": "0.3.14"})


def test_an_engine_starts_without_what_the_one_before_it_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has an engine for each way; each reads the environment when it starts."""
    seen: list[str | None] = []

    class Engine(ScriptedEngine):
        def initialize(self, *_: str) -> int:
            seen.append(os.environ.get("MC_INTRANODE_NVLINK"))
            return 0

    module = SimpleNamespace(TransferEngine=Engine)
    monkeypatch.setattr(mooncake_engine.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    start_engine(intra_node_config("127.0.0.1"))
    start_engine(MooncakeConfig("127.0.0.1"))
    assert seen == ["1", None]
