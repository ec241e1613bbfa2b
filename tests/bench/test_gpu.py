"""The sections' processes, and what they keep when one fails, hangs or is out of time."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graftline.bench import gpu
from graftline.bench.gpu import SECTIONS, Section, run_sections
from graftline.bench.gpu_steps import Steps, run_bounded


def script(folder: Path, body: str) -> list[str]:
    """A program that stands for `python -m graftline.bench.gpu`: OUT and SECTION are what it was told."""
    file = folder / "section.py"
    told = "import json, os, sys, time\ntold = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    file.write_text(f"{told}OUT, SECTION = told['--out'], told['--section']\n{body}\n")
    return [sys.executable, str(file)]


def run(tmp_path: Path, body: str, names: list[str], seconds: float = 30.0) -> dict[str, Any]:
    out = tmp_path / "results" / "gpu.json"
    found = run_sections(names, out, seconds, "some-model", "cpu", script(tmp_path, body))
    assert json.loads(out.read_text()) == json.loads(json.dumps(found, default=str))
    return found


def test_every_section_is_told_its_place_and_its_findings_are_kept(tmp_path: Path) -> None:
    body = "json.dump(told, open(OUT, 'w'))"
    found = run(tmp_path, body, ["parity", "roofline"])
    assert list(found["sections"]) == ["parity", "roofline"]
    for name, section in found["sections"].items():
        assert section["ending"] == "exit code 0"
        told = section["found"]
        assert (told["--section"], told["--model"], told["--device"]) == (name, "some-model", "cpu")
        assert 0 < float(told["--seconds"]) <= SECTIONS[name].seconds
    assert found["machine"]["num_cores"] > 0


def test_sections_are_told_which_batches(tmp_path: Path) -> None:
    command = script(tmp_path, "json.dump(told, open(OUT, 'w'))")
    found = run_sections(["roofline"], tmp_path / "gpu.json", 30.0, "some-model", "cpu", command, ["--batches", "16,4"])
    assert found["sections"]["roofline"]["found"]["--batches"] == "16,4"


@pytest.mark.parametrize(
    ("option", "value", "answer"),
    [
        ("--batches", "4,x", "'4,x' is not a list"),
        ("--batches", "4,0", "'4,0' has a number below 1"),
        ("--models", "8b,70b", "no '70b'"),
        ("--share", "-0.1", "-0.1 is outside [0, 1]"),
    ],
)
def test_says_which_option_is_none(
    option: str,
    value: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "gpu.json"), f"{option}={value}"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert answer in capsys.readouterr().err


def test_a_crash_costs_its_own_section_and_its_last_words_are_kept(tmp_path: Path) -> None:
    body = "print('the last words'); sys.stdout.flush()\nif SECTION == 'parity': os.abort()"
    found = run(tmp_path, body, ["parity", "roofline"])["sections"]
    assert found["parity"]["ending"] == "signal 6"
    assert "the last words" in found["parity"]["output"]
    assert found["roofline"]["ending"] == "exit code 0"
    assert "output" not in found["roofline"]


def test_a_hang_is_killed_at_its_bound_and_what_was_found_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.SECTIONS, "parity", Section(2.0, SECTIONS["parity"].run))
    body = "json.dump({'so far': 1}, open(OUT, 'w'))\nif SECTION == 'parity': time.sleep(60)"
    started = time.monotonic()
    found = run(tmp_path, body, ["parity", "roofline"])["sections"]
    assert time.monotonic() - started < 25
    assert found["parity"] == {"ending": "signal 9", "found": {"so far": 1}} | {
        key: found["parity"][key] for key in ("seconds", "output")
    }
    assert found["roofline"]["found"] == {"so far": 1}


def test_what_a_killed_section_had_started_dies_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.SECTIONS, "parity", Section(4.0, SECTIONS["parity"].run))
    nested = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"
    body = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {nested!r}], stdout=subprocess.PIPE, process_group=0)
json.dump(int(child.stdout.readline()), open(OUT, "w"))
time.sleep(120)
"""
    pid = run(tmp_path, body, ["parity"])["sections"]["parity"]["found"]
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, f"process {pid} outlived its section"
        time.sleep(0.05)


def test_sections_without_time_are_named(tmp_path: Path) -> None:
    found = run(tmp_path, "raise AssertionError", ["parity"], seconds=1.0)["sections"]
    assert found["parity"]["ending"] == "not begun: out of time"


def test_unknown_sections_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "x.json"), "--sections", "parity,nonsense"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no section 'nonsense'" in capsys.readouterr().err


def test_steps_keep_errors_and_skip_what_would_be_late(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    steps = Steps(out, 60.0)

    def fails() -> int:
        raise ValueError("of no use")

    assert steps.step("fails", fails) is None
    assert steps.step("works", lambda: {"ms": 1.5}) == {"ms": 1.5}
    assert steps.step("late", lambda: 1, needs_s=100.0) is None
    found = json.loads(out.read_text())
    assert found["fails"]["error"] == "ValueError: of no use"
    assert any("raise ValueError" in line for line in found["fails"]["trace"])
    assert found["works"] == {"ms": 1.5}
    assert "skipped" in found["late"]
    assert not list(tmp_path.glob("*.new"))


def test_a_bounded_command_is_killed_with_all_it_started(tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    body = f"open({str(part)!r}, 'w').write('{{\"batch\": 1}}'); print('begun', flush=True); {child}"
    started = time.monotonic()
    found = run_bounded([sys.executable, "-c", body], part, 2.0)
    assert time.monotonic() - started < 20  # the grandchild held the pipe
    assert found["found"] == {"batch": 1}
    assert found["ending"] == "signal 9 after 2 s"
    assert found["output"] == ["begun"]
    assert run_bounded([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "none.json", 20.0) == {
        "found": None,
        "ending": "exit code 3",
        "output": [],
    }
