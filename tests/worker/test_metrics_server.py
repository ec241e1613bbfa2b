"""The metrics port of a worker, and those who call it without asking anything."""

import socket
import threading
import time
import urllib.request

import pytest

from graftline.metrics import Metrics, ProcessRole
from graftline.proto.address import parse_address
from graftline.worker.metrics import MetricsServer


def test_idle_connections_do_not_keep_threads(capfd: pytest.CaptureFixture[str]) -> None:
    """CASES Z52: each costs one for as long as it is served."""
    server = MetricsServer(Metrics(ProcessRole.DECODE), "127.0.0.1:0", timeout_s=0.3)
    before = threading.active_count()
    idle = [socket.create_connection(parse_address(server.address)) for _ in range(20)]
    idle[0].sendall(b"GET /metrics HT")
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as answered:
        assert b"graftline" in answered.read()
    deadline_s = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert threading.active_count() == before
    assert [connection.recv(1) for connection in idle] == [b""] * len(idle)
    server.close()
    for connection in idle:
        connection.close()
    assert "Traceback" not in capfd.readouterr().err
