"""The probe of containers, against a real server."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from graftline import health_probe
from graftline.health_probe import access_from, main, probe
from graftline.proto.server import RpcServer


@asynccontextmanager
async def server(*tokens: str) -> AsyncIterator[RpcServer]:
    running = RpcServer("127.0.0.1:0", tokens=tokens)
    await running.start()
    try:
        yield running
    finally:
        await running.stop(0)


async def test_what_a_server_says() -> None:
    async with server() as running:
        assert await asyncio.to_thread(probe, running.address) == "NOT_SERVING"
        await running.set_serving(True)
        assert await asyncio.to_thread(probe, running.address) == "SERVING"
        assert (await asyncio.to_thread(probe, running.address, "not.there")).startswith("NOT_FOUND")


async def test_no_token_is_needed() -> None:
    async with server("secret") as running:
        await running.set_serving(True)
        assert await asyncio.to_thread(main, [running.address]) == 0


async def test_a_process_is_asked_as_containers_do() -> None:
    async with server() as running:
        command = [sys.executable, "-m", health_probe.__name__, running.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert (process.returncode, said) == (1, b"NOT_SERVING\n")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.startswith("UNAVAILABLE")


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a:1", "b", "c"]])
def test_bad_questions(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_access() -> None:
    assert access_from({"GRAFTLINE_PROBE_CA": ""}).tls is None
    tls = access_from({"GRAFTLINE_PROBE_CA": "/ca", "GRAFTLINE_PROBE_KEY": "/key"}).tls
    assert tls is not None
    assert (str(tls.root_ca), tls.certificate, str(tls.private_key)) == ("/ca", None, "/key")
