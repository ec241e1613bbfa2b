"""Real processes on loopback: router, prefill, a decode of two stages, under kill, restart, cancel and signals."""

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest
import pytest_asyncio
from eventually import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny_world import TinyWorld, prompt

from graftline.bench.chaos import free_ports
from graftline.child import ChildDiedError
from graftline.client import AsyncClient
from graftline.errors import CancelledRequestError, GraftlineError, InvalidRequestError
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.launcher import ANY_PORT, Cluster, ClusterSpec, local_cluster, worker_arguments
from graftline.proto.channel import open_channel

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]
NEW_TOKENS = 12
NOTICE_S = 20.0


def spec_of(world: TinyWorld, **changes: object) -> ClusterSpec:
    spec: dict[str, object] = {
        "model": str(world.plain.path),
        "draft_head": str(world.eagle),
        "dtype": "float32",
        "page_size": 4,
        "pages": 64,
        "chunk_tokens": 16,
        "threads": 1,
        "decode_stages": 2,
        "drain_grace_s": 2.0,
    }
    return ClusterSpec(**{**spec, **changes})  # type: ignore[arg-type]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(world: TinyWorld) -> AsyncIterator[Cluster]:
    async with local_cluster(spec_of(world)) as running:
        yield running


async def answer(cluster: Cluster, token_ids: list[int], timeout_s: float = 60.0) -> list[int]:
    async with AsyncClient(cluster.router_address, timeout_s=timeout_s) as client:
        completion = await client.complete(token_ids, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        return list(completion.token_ids)


async def recovered_answer(cluster: Cluster, token_ids: list[int]) -> list[int]:
    """The first answer after a fault: tried again until the system has recovered."""
    deadline_s = time.monotonic() + NOTICE_S
    while True:
        try:
            return await answer(cluster, token_ids)
        except GraftlineError:
            if time.monotonic() > deadline_s:
                raise


def gauges(address: str | None) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answered:
        lines = answered.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def is_whole(cluster: Cluster) -> bool:
    """Nothing open, running, queued or used on any worker."""
    return all(is_idle(cluster, name) for name in cluster.children if not name.startswith("router-"))


def is_idle(cluster: Cluster, name: str) -> bool:
    """Likewise, of one worker; and it has counted every end of what it took."""
    role = name.partition("-")[0]
    now = gauges(cluster.children[name].ready["metrics"])
    busy = [f'graftline_worker_{gauge}_requests{{role="{role}"}}' for gauge in ("open", "running", "queued")]
    ended = sum(value for name, value in now.items() if name.startswith("graftline_worker_requests_ended_total"))
    return (
        not any(now[gauge] for gauge in busy)
        and not now[f'graftline_worker_pages{{role="{role}",state="used"}}']
        and now[f'graftline_worker_slots{{role="{role}",state="used"}}'] == 0
        and now.get(f'graftline_worker_requests_started_total{{role="{role}"}}', 0.0) == ended
    )


async def serves(address: str) -> bool:
    async with open_channel(address) as channel:
        answered = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answered.status == health_pb2.HealthCheckResponse.SERVING)


async def test_answers_are_those_of_the_plain_model(cluster: Cluster, world: TinyWorld) -> None:
    prompts = [prompt(length, length) for length in (1, 3, 4, 5, 16, 17, 40)]
    answers = await asyncio.gather(*(answer(cluster, ids) for ids in prompts))
    assert answers == [world.plain.answer(ids, NEW_TOKENS) for ids in prompts]
    await eventually(lambda: is_whole(cluster), "pools are whole")


async def test_a_storm_of_cancels_leaves_nothing(cluster: Cluster, world: TinyWorld) -> None:
    """CASES B03, G02: disconnects at random phases; every page and slot comes back."""
    draw = Random(7)

    async def begin_and_leave(index: int) -> None:
        task = asyncio.ensure_future(answer(cluster, prompt(9, index)))
        await asyncio.sleep(draw.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(begin_and_leave(index) for index in range(40)))
    await eventually(lambda: is_whole(cluster), "pools are whole")
    assert await answer(cluster, prompt(5, 0)) == world.plain.answer(prompt(5, 0), NEW_TOKENS)


async def test_a_killed_prefill_comes_back_at_its_address(cluster: Cluster, world: TinyWorld) -> None:
    """CASES F01, F04, B11: the decode stays healthy, needs no restart, and gets its pages back."""
    open_requests = [asyncio.ensure_future(answer(cluster, prompt(40, index))) for index in range(4)]
    await asyncio.sleep(0.05)
    await cluster.kill("prefill-0")
    assert await serves(cluster.children["decode-0"].address)
    await cluster.restart("prefill-0")
    for done in await asyncio.gather(*open_requests, return_exceptions=True):
        assert isinstance(done, list | GraftlineError), done
    first = await recovered_answer(cluster, prompt(6, 1))
    assert first == world.plain.answer(prompt(6, 1), NEW_TOKENS)
    for index in range(5):
        assert await answer(cluster, prompt(6, index)) == world.plain.answer(prompt(6, index), NEW_TOKENS)
    assert await serves(cluster.children["decode-0"].address)
    await eventually(lambda: is_whole(cluster), "pools are whole")


async def freeze_until_noticed(cluster: Cluster, name: str) -> None:
    """A new request meanwhile fails by more than its deadline."""
    child = cluster.children[name]
    child.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(GraftlineError) as raised:
            await answer(cluster, prompt(9, 3), timeout_s=NOTICE_S)
        assert not isinstance(raised.value, CancelledRequestError), "a deadline is no notice"
    finally:
        child.send_signal(signal.SIGCONT)


async def test_a_frozen_prefill_is_noticed(cluster: Cluster, world: TinyWorld) -> None:
    """A prefill that is stopped (not dead) fails nobody for long; once it goes on it serves again."""
    await freeze_until_noticed(cluster, "prefill-0")
    assert await recovered_answer(cluster, prompt(9, 3)) == world.plain.answer(prompt(9, 3), NEW_TOKENS)
    await eventually(lambda: is_whole(cluster), "pools are whole")


async def test_a_frozen_decode_is_noticed(cluster: Cluster, world: TinyWorld) -> None:
    """CASES F51: new requests fail by more than their deadline; streams that had begun go on once it does, and what it
    had open before is over.
    """
    begun = [asyncio.ensure_future(answer(cluster, prompt(40, index))) for index in range(4)]
    await asyncio.sleep(0.05)
    await freeze_until_noticed(cluster, "decode-0")
    for index, done in enumerate(await asyncio.gather(*begun, return_exceptions=True)):
        assert isinstance(done, GraftlineError) or done == world.plain.answer(prompt(40, index), NEW_TOKENS)
    assert await recovered_answer(cluster, prompt(9, 3)) == world.plain.answer(prompt(9, 3), NEW_TOKENS)
    await eventually(lambda: is_whole(cluster), "pools are whole")


async def test_a_killed_decode_comes_back_at_its_address(cluster: Cluster, world: TinyWorld) -> None:
    """CASES F52: the prefill stays healthy, gets slots and pages back, and writes into the new pools."""
    open_requests = [asyncio.ensure_future(answer(cluster, prompt(40, index))) for index in range(6)]
    await asyncio.sleep(0.05)
    await cluster.kill("decode-0")
    await eventually(lambda: is_idle(cluster, "prefill-0"), "the prefill is whole")
    assert await serves(cluster.children["prefill-0"].address)
    await cluster.restart("decode-0")
    for done in await asyncio.gather(*open_requests, return_exceptions=True):
        assert isinstance(done, list | GraftlineError), done
    for index in range(5):
        assert await recovered_answer(cluster, prompt(6, index)) == world.plain.answer(prompt(6, index), NEW_TOKENS)
    await eventually(lambda: is_whole(cluster), "pools are whole")


async def test_a_killed_router_leaves_nothing_running(cluster: Cluster, world: TinyWorld) -> None:
    """CASES F53: workers end what a router has asked for when it is gone."""
    open_requests = [asyncio.ensure_future(answer(cluster, prompt(40, index))) for index in range(6)]
    await asyncio.sleep(0.05)
    await cluster.kill("router-0")
    await asyncio.gather(*open_requests, return_exceptions=True)
    await eventually(lambda: is_whole(cluster), "pools are whole")
    await cluster.restart("router-0")
    assert await recovered_answer(cluster, prompt(5, 0)) == world.plain.answer(prompt(5, 0), NEW_TOKENS)


async def test_idle_processes_rest(cluster: Cluster) -> None:
    """CASES P51: stages that wait for each other do not take a core each."""
    processes = [psutil.Process(child.pid) for child in cluster.children.values()]
    processes += [stage for process in processes for stage in process.children(recursive=True)]
    assert len(processes) >= 4
    before_s = sum(sum(process.cpu_times()[:2]) for process in processes)
    await asyncio.sleep(3.0)
    taken_s = sum(sum(process.cpu_times()[:2]) for process in processes) - before_s
    assert taken_s < 1.0


async def test_a_killed_stage_ends_its_worker(cluster: Cluster, world: TinyWorld) -> None:
    """CASES H03: nobody keeps asking a pipeline that lost a stage; a restart at the address serves again."""
    decode = cluster.children["decode-0"]
    stages = psutil.Process(decode.pid).children()
    assert len(stages) == 1
    stages[0].kill()
    async with asyncio.timeout(NOTICE_S):
        assert await cluster.wait_for_death() is decode
        assert await decode.wait() == 1
    assert "cannot go on" in decode.tail(100)
    await cluster.restart("decode-0")
    again = await recovered_answer(cluster, prompt(6, 2))
    assert again == world.plain.answer(prompt(6, 2), NEW_TOKENS)


async def test_sigterm_is_a_clean_end(cluster: Cluster) -> None:
    """CASES F08: exit status 0 after a drain."""
    child = cluster.children["prefill-0"]
    assert await child.stop(30.0) == 0
    await cluster.restart("prefill-0")


async def test_a_child_that_cannot_start_is_named(world: TinyWorld, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ChildDiedError, match=r"(?s)decode-0 ended with status 2.*layer_split"):
        async with local_cluster(spec_of(world, decode_split="1,1", log_dir=tmp_path)):
            pass
    assert_gone([process for process in psutil.Process().children(recursive=True) if process not in before])


def start_up(world: TinyWorld) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """`graftline up`, once it says that it is ready, and the processes it started."""
    options = f"--model {world.plain.path} --draft-head {world.eagle} --dtype float32 --page-size 4 --pages 64"
    up = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "graftline",
            "up",
            "--listen",
            ANY_PORT,
            "--http-listen",
            ANY_PORT,
            *options.split(),
            "--threads",
            "1",
            "--drain-grace-s",
            "1",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    for line in up.stderr:
        if line.startswith("try: "):
            break
    started = psutil.Process(up.pid).children(recursive=True)
    assert len(started) >= 3
    return up, started


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; where nobody reaps orphans it stays a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + NOTICE_S
    while alive := [process for process in processes if not is_gone(process)]:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.05)


async def test_any_start_order(world: TinyWorld, tmp_path: Path) -> None:
    """CASES F11: the router first, then the decode, the prefill last; each waits for nobody."""
    spec = spec_of(world, first_port=free_ports(), decode_stages=1)
    spec = replace(spec, listen=f"127.0.0.1:{spec.first_port + 2}")
    cluster = Cluster(spec, tmp_path, lambda _: None)
    addresses = {name: f"127.0.0.1:{spec.first_port + index}" for index, name in enumerate(("prefill", "decode"))}
    router = ["router", "--listen", spec.listen, "--http-listen", ANY_PORT]
    for role, address in addresses.items():
        router += [f"--{role}", address]
    try:
        starting = asyncio.ensure_future(cluster.start("router-0", router))
        await cluster.start("decode-0", worker_arguments(spec, "decode-0"))
        assert not starting.done()
        await cluster.start("prefill-0", worker_arguments(spec, "prefill-0"))
        await starting
        assert await answer(cluster, prompt(6, 1)) == world.plain.answer(prompt(6, 1), NEW_TOKENS)
    finally:
        await cluster.stop()


async def test_a_log_folder_that_is_a_file_is_refused(world: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"log_dir: cannot be made: .*File exists"):
        async with local_cluster(replace(spec_of(world), log_dir=tmp_path / "file")):
            pass


def listeners(cluster: Cluster) -> set[tuple[str, int]]:
    """Where processes of the cluster listen, those of stages included."""
    found: set[tuple[str, int]] = set()
    for child in cluster.children.values():
        process = psutil.Process(child.pid)
        for each in (process, *process.children(recursive=True)):
            sockets = each.net_connections("tcp")
            found |= {(sock.laddr.ip, sock.laddr.port) for sock in sockets if sock.status == psutil.CONN_LISTEN}
    return found


async def test_only_transfers_listen_everywhere(cluster: Cluster) -> None:
    """CASES Z01: stages of one host meet on its loopback; docs/transfer.md says of whom the transfer engine lets in."""
    config = MooncakeConfig("127.0.0.1")
    everywhere = {port for host, port in listeners(cluster) if host in ("0.0.0.0", "::")}
    assert everywhere
    assert all(config.min_port <= port < config.max_port for port in everywhere)


@pytest.mark.parametrize("garbage", [pickle.dumps(print), b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 4096], ids=len)
async def test_garbage_harms_no_port(cluster: Cluster, world: TinyWorld, garbage: bytes) -> None:
    """CASES Z01: whatever comes to a port, of service, transfer or stage, nobody runs it and everybody goes on."""

    async def throw_at(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection("::1" if host == "::" else host, port)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                writer.write(garbage)
                await writer.drain()
                writer.write_eof()
                await reader.read(1024)
        writer.close()

    ports = listeners(cluster)
    assert len(ports) > 10
    await asyncio.gather(*(throw_at(*port) for port in ports))
    assert all(child.returncode is None for child in cluster.children.values())
    assert listeners(cluster) == ports
    assert await answer(cluster, prompt(5, 1)) == world.plain.answer(prompt(5, 1), NEW_TOKENS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_up_leaves_nothing_running(world: TinyWorld, number: signal.Signals) -> None:
    """Ctrl-C stops all in order; even a kill of the launcher ends every process it started."""
    up, started = await asyncio.to_thread(start_up, world)
    up.send_signal(number)
    status = await asyncio.to_thread(up.wait, 60)
    assert status == (0 if number is signal.SIGINT else -signal.SIGKILL)
    await asyncio.to_thread(assert_gone, started)


@pytest.mark.slow
async def test_up_notices_a_dead_child(world: TinyWorld) -> None:
    up, started = await asyncio.to_thread(start_up, world)
    prefill = next(process for process in started if "prefill" in process.cmdline())
    prefill.kill()
    assert up.stderr is not None
    _, said = await asyncio.to_thread(up.communicate, None, 60)
    assert up.returncode == 1
    assert "prefill-0 was ended by SIGKILL" in said
    await asyncio.to_thread(assert_gone, started)
