"""Every bad value of an option is refused at the start: by name, in one line, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tiny_world import TinyWorld

from graftline.cli_options import TOKEN_FILE_VARIABLE, access, server_tls, token_or_file
from graftline.engine.config import EngineConfig, Role
from graftline.engine.tree_shape import NO_SPECULATION
from graftline.errors import InvalidRequestError
from graftline.proto.address import advertised_address, parse_address, parse_peer
from graftline.worker.host_memory import check_room, host_bytes

# Run as users run them: what is tested is what they see. A few stand for all: each starts a process.
BAD = [
    ("router", "--hang-timeout-s", "inf"),
    ("router", "--token", ""),
    ("router", "--tls-ca", "/nonexistent"),
    ("decode", "--peer-silence-s", "1e12"),
    ("decode", "--threads", "100000"),
    ("decode", "--pages", "99999999999"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("role", "option", "value"), BAD)
def test_a_bad_value_is_refused_by_name(world: TinyWorld, role: str, option: str, value: str) -> None:
    """CASES D51."""
    usual = {
        "router": ["--decode", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"],
        "decode": ["--model", str(world.plain.path), "--dtype", "float32", "--pages", "64", "--listen", "127.0.0.1:0"],
    }[role]
    command = [sys.executable, "-m", "graftline", role, *usual, option, value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said
    assert option.removeprefix("--").replace("-", "_") in said.replace("-", "_"), said


def test_a_cpu_worker_without_its_kernels_does_not_start(world: TinyWorld, tmp_path: Path) -> None:
    """CASES D54: as in a small image; what it answered could differ from what the plain model does."""
    command = [sys.executable, "-m", "graftline", "decode", "--model", str(world.plain.path), "--dtype", "float32"]
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [*command, "--pages", "64", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said
    assert "GRAFTLINE_NATIVE_LIBRARY: there are no native kernels" in said


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "tökén", "\x7f"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(
    token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CASES D51, Z53: an empty one would open the door, others fail at the first call."""
    with pytest.raises(typer.BadParameter) as given:
        token_or_file(token)
    file = tmp_path / "token"
    file.write_text(token)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    with pytest.raises(typer.BadParameter) as read:
        token_or_file(None)
    assert not token or (token not in str(given.value) and token not in str(read.value))


def test_files_of_tls_are_read_before_ports_are_opened(tmp_path: Path) -> None:
    """CASES D51: gRPC says of a bad key that it cannot bind a port."""
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("no PEM")
    for bad in (tmp_path / "absent", no_pem):
        with pytest.raises(typer.BadParameter, match="--tls-certificate or --tls-key"):
            server_tls(bad, bad, None)
        with pytest.raises(typer.BadParameter, match="--tls-ca"):
            access(None, None, None, bad)


@pytest.mark.parametrize("address", ["a b:1", "a\n:1", "a:123456", "a:٣", "a:", ":1", "::1:70", "a:-1"])
def test_addresses_that_nobody_can_use_are_refused(address: str) -> None:
    """CASES D51."""
    with pytest.raises(InvalidRequestError, match="x: "):
        parse_address(address, field="x")
    with pytest.raises(InvalidRequestError, match="has a scheme; write host:port"):
        parse_address("http://127.0.0.1:7001")
    with pytest.raises(InvalidRequestError, match="port 0"):
        parse_peer("a:0")
    with pytest.raises(InvalidRequestError, match="advertise"):
        advertised_address("127.0.0.1:1", 1, "a b")


def test_pools_are_compared_with_the_memory_there_is(world: TinyWorld, tmp_path: Path) -> None:
    """CASES D51: a container's limit counts; what runs beside it does not."""
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert host_bytes((tmp_path / "absent", limit)) == 1 << 20
    limit.write_text("max\n")
    assert host_bytes((limit,)) > 1 << 28
    config = EngineConfig(
        model=str(world.plain.path), role=Role.PREFILL, num_pages=1000, layer_split=(2, 2), tree=NO_SPECULATION
    )
    check_room(config, None, 1 << 30)
    with pytest.raises(InvalidRequestError, match=r"pages: 1000 pages of .* take .* has 0\.0 GiB"):
        check_room(config, None, 1 << 20)
    with pytest.raises(InvalidRequestError, match="pages"):
        check_room(config, 1, 1 << 16)
