"""Settings that containers and pods need: tokens from files, addresses known only at run time."""

import resource
import socket
from pathlib import Path

import pytest
import typer
import typer.main

from graftline import cli_worker
from graftline.cli_options import TOKEN_FILE_VARIABLE, settled_advertise, settled_transfer_host, token_or_file
from graftline.cli_router import raise_file_limit, told_address
from graftline.errors import InvalidRequestError
from graftline.worker.config import TransferConfig, TransferProtocol


def test_a_token_given_outweighs_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert token_or_file(None) is None
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    assert token_or_file("given") == "given"
    assert token_or_file(None) == "from-file"


@pytest.mark.parametrize("content", [None, b" \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    """Nobody who asked for a token may end up without one."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    with pytest.raises(typer.BadParameter, match=TOKEN_FILE_VARIABLE):
        token_or_file(None)


def test_auto_is_this_hosts_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert settled_advertise("auto") == "127.0.0.1"
    assert settled_advertise("decode-3:7001") == "decode-3:7001"
    assert settled_advertise(None) is None
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(InvalidRequestError, match="no-such-host"):
        settled_advertise("auto")


@pytest.mark.parametrize(
    ("given", "listen", "advertise", "expected"),
    [
        ("", "127.0.0.1:0", None, "127.0.0.1"),
        ("", "0.0.0.0:7001", "10.1.2.3", "10.1.2.3"),
        ("", "0.0.0.0:7001", "decode-3:7001", "decode-3"),
        ("", "[::]:7001", "[fd00::1]:7001", "fd00::1"),
        ("ib0.host", "0.0.0.0:7001", "10.1.2.3", "ib0.host"),
    ],
)
def test_transfers_go_where_rpcs_go(given: str, listen: str, advertise: str | None, expected: str) -> None:
    assert settled_transfer_host(given, listen, advertise) == expected


def test_wildcards_are_refused() -> None:
    """CASES D01: peers could not reach it."""
    with pytest.raises(InvalidRequestError, match="advertise"):
        settled_transfer_host("", "0.0.0.0:7001", None)


def test_a_router_may_listen_on_every_interface_without_saying_more() -> None:
    """Nobody dials it by what it says of itself."""
    assert told_address("0.0.0.0:7000", None) == told_address("[::]:7000", None) == socket.gethostname()
    assert told_address("127.0.0.1:7000", None) is None
    assert told_address("0.0.0.0:7000", "router.example:7000") == "router.example:7000"


def transfer_config(*arguments: str) -> TransferConfig:
    """What `graftline decode` makes of a command line."""
    group = typer.main.get_command(cli_worker.app)
    command = group.get_command(typer.Context(group), "decode")  # type: ignore[attr-defined]
    return cli_worker.worker_config(command.make_context("decode", list(arguments)).params).transfer


def test_ways_of_transfers() -> None:
    plain = transfer_config("--listen", "0.0.0.0:7001", "--advertise", "10.1.2.3")
    assert (plain.host, plain.protocol, plain.intra_node_gpu) == ("10.1.2.3", TransferProtocol.AUTO, True)
    rdma = transfer_config("--transfer-protocol", "rdma", "--rdma-devices", "mlx5_0,mlx5_1")
    assert (rdma.protocol, rdma.rdma_devices) == (TransferProtocol.RDMA, "mlx5_0,mlx5_1")
    assert not transfer_config("--no-intra-node-gpu").intra_node_gpu


def test_a_router_takes_the_open_files_it_may_have() -> None:
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_router_starts_with_the_open_files_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()
    assert "no more than 1024" in caplog.text
