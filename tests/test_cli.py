"""The command line itself: what is there, what it says to bad input, and generate against a scripted router."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from scripted_router import ScriptedRouter
from typer.testing import CliRunner

import graftline
from graftline import cli, cli_cluster, cli_worker
from graftline.cli import LAZY_COMMANDS, app, model_app
from graftline.cli_cluster import Answer, _figures
from graftline.client import Finish, FinishReason, Handoff, Speculation, TreeOrigin, Usage
from graftline.engine.config import StageMode
from graftline.engine.model_fetch import CATALOG
from graftline.errors import UnauthenticatedError
from graftline.launcher import ClusterSpec
from graftline.tracing import configured_endpoint
from graftline.worker import early_stages

FINISH = Finish(
    FinishReason.STOP,
    None,
    2,
    Usage(11, 21, 4),
    Speculation(10, 30, 10, 3, 2, TreeOrigin.REAL),
    Handoff(2_048_000, 0.001, 0.0, 0.1, 1),
    1,
    "p:1",
    "d:1",
)


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "graftline", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == graftline.__version__


@pytest.mark.parametrize("name", sorted(LAZY_COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_help_lists_commands_without_importing_engines() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from graftline.cli import app\n"
        "print(CliRunner().invoke(app, ['generate', '--help']).exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "False"]


def test_known_models_are_listed() -> None:
    result = CliRunner().invoke(model_app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in CATALOG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("decode", "--model", "no-such-model"), "model: 'no-such-model' is no known name"),
        (("router",), "no workers"),
        (("router", "--prefill", "nowhere", "--decode", "d:1"), "workers.prefill"),
        (("up", "--decodes", "0"), "--decodes"),
        (("decode", "--draft-depth", "x"), "--draft-depth"),
        (("decode", "--tls-key", "key.pem"), "tls"),
        (("router", "--prefill", "p:1", "--decode", "d:1", "--otlp-endpoint", "collector:4317"), "otlp_endpoint"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_token_says_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise UnauthenticatedError("a bearer token is required")

    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "a bearer token is required (--token, GRAFTLINE_TOKEN" in capsys.readouterr().err


def test_no_router_to_generate_with() -> None:
    done = run("generate", "hello", "--router", "127.0.0.1:1", "--timeout-s", "5")
    assert done.returncode == 1
    assert done.stderr.startswith("graftline: ")
    assert done.stderr.count("\n") == 1, "logs are read by lines"


@pytest.mark.parametrize("arguments", [["hello"], ["hello", "--chat", "--stats"], ["-", "--system", "be brief"]])
async def test_generate_streams_an_answer(arguments: list[str]) -> None:
    async with ScriptedRouter().running() as router:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "graftline", "generate", *arguments, "--router", router.address, "--seed", "3"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(b"from standard input")
        assert process.returncode == 0, err.decode()
        assert out.decode().endswith("\n")
        (asked,) = router.requests
        assert asked.seed == 3
        if "--chat" in arguments:
            assert asked.chat.messages[0].content == "hello"
            assert "accept length" in err.decode()
        elif "-" in arguments:
            assert [message.role for message in asked.chat.messages] == ["system", "user"]
            assert asked.chat.messages[1].content == "from standard input"
        else:
            assert asked.text == "hello"


def test_up_tells_every_process_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ClusterSpec] = []

    async def up(spec: ClusterSpec, console: Console) -> int:
        started.append(spec)
        return 0

    monkeypatch.setattr(cli_cluster, "_up", up)
    for arguments in ([], ["--otlp-endpoint", "http://collector:4317"]):
        assert CliRunner().invoke(app, ["up", *arguments]).exit_code == 0
    off, on = started
    assert dict(off.environment) == {}
    assert configured_endpoint(None, on.environment) == "http://collector:4317"


@pytest.mark.parametrize(
    ("split", "later"), [("auto", 2), ("weights", 2), ("measured", 2), ("10,20", 1), ("30", 0)], ids=str
)
def test_later_stages_are_forked_early_whatever_splits_the_layers(
    split: str, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose stages were not would take seconds longer to start."""
    forked: list[int] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(early_stages, "fork_stages", lambda count, run: (forked.append(count), ())[1])
    given = {"stage_mode": StageMode.PROCESSES, "devices": "cpu", "layer_split": split, "stages": 3}
    assert cli_worker._fork_later_stages(given) == ()
    assert sum(forked) == later


def test_the_demos_table() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(_figures([Answer(FINISH, first_token_s=0.05, total_s=0.25)]))
    row = next(line for line in console.export_text().splitlines() if "real" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["1", "11", "21", "50", "10.0", "2.00", "2 of 3", "real", "2000", "2.05"]
