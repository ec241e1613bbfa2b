"""What a round costs the host, measured for a moment."""

import json
from pathlib import Path

import pytest

from graftline.bench.round_host import main


def test_rounds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "round_host.json"
    main(["--requests", "2,6", "--rounds", "50", "--out", str(out)])
    small, large = json.loads(out.read_text())
    assert (small["requests"], small["microbatch"], large["requests"], large["microbatch"]) == (2, 1, 6, 3)
    assert large["result_bytes"] > 2 * small["result_bytes"]
    for figures in (small, large):
        assert 1 < figures["tokens_a_request"] < 6
        assert min(figures["scheduler_us"], figures["plan_us"], figures["result_us"]) > 0
    assert len(capsys.readouterr().out.splitlines()) == 2
