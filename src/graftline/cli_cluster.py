"""`graftline up` and `graftline demo`: a whole deployment on this machine."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from graftline import cli_options as shared
from graftline.cli_worker import ENGINE_OPTIONS, Option, with_options
from graftline.client import AsyncClient, Finish, Message
from graftline.launcher import Cluster, ClusterSpec, local_cluster
from graftline.router.config import PolicyName
from graftline.tracing import ENDPOINT_VARIABLE

app = typer.Typer()

_CLUSTER, _NETWORK = "Cluster", "Network"
# What is said once for each role, or makes sense for one process alone.
_PER_ROLE = {"stages", "layer_split"}
CLUSTER_OPTIONS = (
    Option("prefills", int, "Prefill workers.", _CLUSTER, 1),
    Option("decodes", int, "Decode workers.", _CLUSTER, 1),
    Option("routers", int, "Routers.", _CLUSTER, 1),
    Option("prefill_stages", int, "Pipeline stages of every prefill.", _CLUSTER, 1),
    Option("decode_stages", int, "Pipeline stages of every decode.", _CLUSTER, 1),
    Option("prefill_split", str, "Layers of every prefill stage (10,20), or auto.", _CLUSTER),
    Option("decode_split", str, "Layers of every decode stage (10,12,8), or auto.", _CLUSTER),
    Option("prefill_devices", str, "Devices of every prefill's stages; empty: --devices.", _CLUSTER),
    Option("decode_devices", str, "Devices of every decode's stages; empty: --devices.", _CLUSTER),
    Option("policy", PolicyName, "How routers pick workers.", _CLUSTER),
    Option("log_dir", Path, "Where processes log; by default a temporary directory.", _CLUSTER),
    Option("start_timeout_s", float, "Seconds for a process to be ready.", _CLUSTER, 1),
    Option("drain_grace_s", float, "Seconds for open requests when stopping.", _CLUSTER, 0),
    Option("listen", str, "host:port of the first router's gRPC.", _NETWORK),
    Option("http_listen", str, "host:port of the first router's HTTP.", _NETWORK),
    Option("otlp_endpoint", str, "http://host:port of an OTLP collector that spans go to.", _NETWORK, default=""),
    Option("token", str, "Bearer token of every hop; by default $GRAFTLINE_TOKEN, or none.", _NETWORK),
)
DEMO_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sound of rain on a tin roof.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
)
DEMO_MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, timed by its client."""

    finish: Finish
    first_token_s: float
    total_s: float

    @property
    def per_token_s(self) -> float | None:
        """Seconds a token after the first."""
        rest = self.finish.usage.completion_tokens - 1
        return (self.total_s - self.first_token_s) / rest if rest > 0 else None


def cluster_options() -> list[Any]:
    """Parameters for every field of `ClusterSpec` that a command line can say."""
    spec = ClusterSpec()
    rows = [*CLUSTER_OPTIONS, *(option for option in ENGINE_OPTIONS if option.name not in _PER_ROLE)]
    return [option.parameter(getattr(spec, option.name, option.default)) for option in rows]


def up(**given: Any) -> None:
    """Start routers, prefills and decodes on this machine, until Ctrl-C."""
    spec = _spec(given)
    raise typer.Exit(_run(_up(spec, Console(stderr=True))))


def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A chat message instead of the built-in ones; repeat it.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of every answer.")] = DEMO_MAX_TOKENS,
    **given: Any,
) -> None:
    """Start one prefill and a two-stage decode, stream answers to a few chat prompts, print figures, stop."""
    spec = _spec(given)
    raise typer.Exit(_run(_demo(spec, prompt or DEMO_PROMPTS, max_tokens, Console())))


# Where `graftline generate` and OpenAI clients look by themselves; a demo takes any free ports.
_UP_DEFAULTS = {"listen": "127.0.0.1:7000", "http_listen": "127.0.0.1:8000"}
_DEMO_DEFAULTS = {"decode_stages": 2}


def _with_defaults(defaults: Mapping[str, object]) -> list[Any]:
    return [
        parameter.replace(default=defaults[parameter.name]) if parameter.name in defaults else parameter
        for parameter in cluster_options()
    ]


app.command()(with_options(up, _with_defaults(_UP_DEFAULTS)))
app.command()(with_options(demo, _with_defaults(_DEMO_DEFAULTS)))


def _spec(given: dict[str, Any]) -> ClusterSpec:
    known = {field.name for field in fields(ClusterSpec)}
    values = {name: value for name, value in given.items() if name in known}
    values["policy"] = values["policy"].value if isinstance(values["policy"], PolicyName) else values["policy"]
    values["token"] = shared.token_or_file(values["token"] or os.environ.get("GRAFTLINE_TOKEN") or None) or ""
    if given["otlp_endpoint"]:
        values["environment"] = {ENDPOINT_VARIABLE: given["otlp_endpoint"]}
    return ClusterSpec(**values)


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Runs until done; SIGINT and SIGTERM cancel it, which stops the cluster in order."""

    async def main() -> int:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 0

    return asyncio.run(main())


async def _up(spec: ClusterSpec, console: Console) -> int:
    async with _shown(spec, console) as cluster:
        console.print(_addresses(cluster))
        console.print(f'try: graftline generate "Hello" --chat --router {cluster.router_address}', markup=False)
        dead = await cluster.wait_for_death()
        console.print(str(dead.death()), style="red", markup=False, highlight=False)
        return 1


async def _demo(spec: ClusterSpec, prompts: Sequence[str], max_tokens: int, console: Console) -> int:
    answers: list[Answer] = []
    async with (
        _shown(spec, Console(stderr=True)) as cluster,
        AsyncClient(cluster.router_address, token=spec.token or None, timeout_s=300) as client,
    ):
        for prompt in prompts:
            console.print(f"\n[bold]{_escaped(prompt)}[/bold]")
            answers.append(await _answer(client, prompt, max_tokens, console))
    console.print()
    console.print(_figures(answers))
    return 0


async def _answer(client: AsyncClient, prompt: str, max_tokens: int, console: Console) -> Answer:
    begin_s = time.monotonic()
    first_token_s: float | None = None
    finish: Finish | None = None
    async for delta in client.generate([Message("user", prompt)], max_tokens=max_tokens, temperature=0):
        if delta.token_ids and first_token_s is None:
            first_token_s = time.monotonic() - begin_s
        console.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
        finish = delta.finish or finish
    console.print()
    total_s = time.monotonic() - begin_s
    assert finish is not None, "a stream that ends well has a finish"
    return Answer(finish, first_token_s if first_token_s is not None else total_s, total_s)


def _shown(spec: ClusterSpec, console: Console) -> Any:
    """The cluster, its start told line by line."""
    begin_s = time.monotonic()

    def progress(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - begin_s:6.1f} s[/dim]  {_escaped(line)}", highlight=False)

    return local_cluster(spec, progress)


def _addresses(cluster: Cluster) -> Table:
    table = Table("process", "gRPC", "HTTP or metrics", "pid")
    for name, child in cluster.children.items():
        other = child.ready.get("http") or child.ready.get("metrics") or "-"
        table.add_row(name, child.address, other, str(child.pid))
    return table


def _figures(answers: Sequence[Answer]) -> Table:
    table = Table(
        "#",
        "in",
        "out",
        "TTFT\nms",
        "TPOT\nms",
        "accept\nlength",
        "accepted in\nfirst round",
        "first\ntree",
        "KV\nKiB",
        "GB/s",
    )
    for number, answer in enumerate(answers, start=1):
        usage, speculation, handoff = answer.finish.usage, answer.finish.speculation, answer.finish.handoff
        rate = handoff.num_bytes / handoff.write_s / 1e9 if handoff.write_s > 0 else None
        table.add_row(
            str(number),
            str(usage.prompt_tokens),
            str(usage.completion_tokens),
            f"{1000 * answer.first_token_s:.0f}",
            _number(None if answer.per_token_s is None else 1000 * answer.per_token_s, 1),
            _number(speculation.accept_length, 2),
            f"{speculation.first_round_accepted} of {speculation.first_round_drafted}" if speculation.rounds else "-",
            speculation.tree_origin.value,
            f"{handoff.num_bytes / 1024:.0f}",
            _number(rate, 2),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
