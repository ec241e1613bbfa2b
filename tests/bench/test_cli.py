"""The command from its options to its result file, on scripted routers."""

import asyncio
import io
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from scripted_router import Script, ScriptedRouter
from typer.testing import CliRunner

from graftline.bench.cli import app, run_bench
from graftline.bench.compare import Contestant, Plan
from graftline.bench.load import Concurrency
from graftline.bench.prompt_set import Prompt, PromptSet
from graftline.bench.records import VariantFacts, read_result
from graftline.bench.target import BenchRequest, Finish, Message, Target
from graftline.errors import PeerUnavailableError

RUNNER = CliRunner()


@contextmanager
def running(*routers: ScriptedRouter) -> Iterator[None]:
    """Runs routers on an event loop of another thread: the command has its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    async def start() -> None:
        for router in routers:
            await stack.enter_async_context(router.running())

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=10)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def invoke(*arguments: str | Path) -> str:
    """Runs the command, which must succeed."""
    result = RUNNER.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_router_is_measured_and_the_result_written(tmp_path: Path) -> None:
    router = ScriptedRouter()
    output = tmp_path / "r.json"
    options = ["--kinds", "chat,code", "--num-requests", "4", "--warmup", "1", "--max-tokens", "9", "--seed", "5"]
    with running(router):
        shown = invoke("--router", router.address, "--concurrency", "1,2", *options, "--output", output)
    result = read_result(output)
    assert [(run.load, len(run.records)) for run in result.runs] == [("concurrency 1", 4), ("concurrency 2", 4)]
    assert {record.kind for record in result.runs[0].records} == {"chat", "code"}
    assert [summary.num_failed for summary in result.summaries] == [0, 0]
    assert result.variants[0].settings == {"router": router.address}
    assert result.workload.max_tokens == 9
    assert len(router.requests) == 10
    assert {request.seed for request in router.requests} == set(range(5, 13))
    assert "concurrency 2" in shown
    assert "4/4" in shown


def test_variants_are_compared_with_the_first(tmp_path: Path) -> None:
    slow = ScriptedRouter(lambda _: Script(round_s=0.05))
    fast = ScriptedRouter(lambda _: Script(round_s=0.025))
    output = tmp_path / "r.json"
    with running(slow, fast):
        variants = ["--variant", f"slow=router:{slow.address}", "--variant", f"fast=router:{fast.address}"]
        options = ["--compare", "--rounds", "2", "--num-requests", "2", "--warmup", "0", "--output", output]
        shown = invoke(*options, *variants)
    result = read_result(output)
    assert [run.variant for run in result.runs] == ["slow", "fast", "slow", "fast"]
    (tpot,) = [ratio for ratio in result.ratios if ratio.metric == "tpot_mean_s"]
    assert (tpot.variant, tpot.base) == ("fast", "slow")
    assert tpot.value == pytest.approx(0.5, abs=0.1)
    assert "2 rounds, variants in turn" in result.method
    assert "TPOT mean" in shown
    assert "fast, concurrency 1: 4 of 4 outputs equal slow's" in shown

    document = tmp_path / "results.md"
    document.write_text("<!-- bench: r.json -->\n<!-- end -->\n")
    invoke("report", output, "--document", document)
    assert "| fast | TPOT mean |" in document.read_text()
    assert "| fast | TPOT mean |" in invoke("report", output)


def test_rates_are_loads_too(tmp_path: Path) -> None:
    router = ScriptedRouter()
    output = tmp_path / "r.json"
    with running(router):
        invoke("--router", router.address, "--rate", "50", "--num-requests", "3", "--output", output)
    assert [run.load for run in read_result(output).runs] == ["rate 50/s"]


def test_failures_are_shown_and_all_failing_is_an_error() -> None:
    def sometimes(request: object) -> Script:
        return Script(error=PeerUnavailableError("no decode")) if len(router.requests) % 2 else Script()

    router = ScriptedRouter(sometimes)
    with running(router):
        shown = invoke("--router", router.address, "--num-requests", "2", "--warmup", "0")
        assert "UNAVAILABLE no decode" in shown
        router.pick = lambda _: Script(error=PeerUnavailableError("none at all"))
        result = RUNNER.invoke(app, ["--router", router.address, "--num-requests", "2", "--warmup", "0"])
        assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "0"], "concurrency: '0' is not a positive number"),
        (["--concurrency", "1.5"], "concurrency: '1.5' is not a whole number"),
        (["--rate", "fast"], "rate: 'fast'"),
        (["--rate", "nan"], "rate: 'nan'"),
        (["--kinds", "poems"], "kinds: 'poems'"),
        (["--prompts", "/nowhere"], "prompts: cannot read"),
        (["--compare"], "at least two variants"),
        (["--variant", "a=router:nohost"], "a.router: 'nohost' is not host:port"),
        (["--variant", "a=router:h:1,color:red"], "a.color: a router takes no further settings"),
        (["--variant", "router=router:h:1"], "the name 'router' is used twice"),
        (["--variant", "a=baseline:magic", "--model", "."], "a.baseline: 'magic' does not fit: choose of"),
        (["--variant", "a=stage:3"], "a.stage: there is no such setting"),
        (["--cluster", "colour:red", "--variant", "a=decode_stages:1"], "cluster.colour"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, ["--router", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


def test_a_report_of_no_result_is_refused(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["report", str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "cannot read" in result.output


@pytest.mark.parametrize("turns_before", [0, 3])
def test_an_interrupt_keeps_the_whole_rounds(turns_before: int) -> None:
    num_turns = 0

    class Interrupted:
        async def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message, None]:
            nonlocal num_turns
            if num_turns == turns_before:
                raise KeyboardInterrupt
            num_turns += 1
            yield Message((1, 2), Finish("length", 1))

    @asynccontextmanager
    async def start() -> AsyncIterator[Target]:
        yield Interrupted()

    plan = Plan(
        loads=[Concurrency(1)],
        rounds=3,
        num_requests=1,
        warmup=0,
        max_tokens=2,
        temperature=0.0,
        seed=0,
        ignore_eos=False,
        timeout_s=1.0,
    )
    prompts = PromptSet("p", "0", ("any",), (Prompt(id="p", text="x"),))
    facts = [VariantFacts(name, "router", {}) for name in "ab"]
    arguments = ([Contestant(name, start) for name in "ab"], facts, plan, prompts, Console(file=io.StringIO()))
    if not turns_before:
        with pytest.raises(KeyboardInterrupt):
            run_bench(*arguments)
        return
    result = run_bench(*arguments)
    assert [(run.variant, run.round) for run in result.runs] == [("a", 0), ("b", 0)]
    assert "interrupted, 1 rounds were whole" in result.method
    assert result.ratios
