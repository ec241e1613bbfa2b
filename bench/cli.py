"""`graftline bench`: measure a router or a cluster of its own, compare configurations, write results and reports."""

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from graftline.bench.compare import Contestant, Idle, Plan, measure, ratios, same_outputs, whole_rounds
from graftline.bench.contestants import Clusters, NoClusters, make_contestants
from graftline.bench.display import ProgressWatcher, show
from graftline.bench.load import Concurrency, Load, PoissonRate
from graftline.bench.machine import command_line, machine_facts
from graftline.bench.metrics import summarise_runs
from graftline.bench.plots import PlotFormat, write_plots
from graftline.bench.prompt_set import DEFAULT_PROMPTS, PromptSet, read_prompts
from graftline.bench.records import BenchResult, Run, VariantFacts, Workload, read_result, write_result
from graftline.bench.report import render, update_document
from graftline.bench.variants import (
    STANDARD_VARIANTS,
    Variant,
    VariantKind,
    check_names,
    parse_settings,
    parse_variant,
    read_variants,
)
from graftline.engine.model_fetch import DEFAULT_MODEL
from graftline.errors import GraftlineError, InvalidRequestError
from graftline.proto.channel import Access

app = typer.Typer(
    add_completion=False, help="Measure latency, throughput and speculation, and compare configurations in one run."
)

_SYSTEM = "The system"
_WORK = "The work"
_COMPARE = "Comparison"


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    router: Annotated[
        str | None,
        typer.Option(help="host:port of a running router; else a cluster is started.", rich_help_panel=_SYSTEM),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="GRAFTLINE_TOKEN", help="Bearer token of the router.", rich_help_panel=_SYSTEM)
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Known name, directory or GGUF file.", rich_help_panel=_SYSTEM),
    ] = DEFAULT_MODEL,
    cluster: Annotated[
        str, typer.Option(help="Settings of every cluster: key:value,key:value.", rich_help_panel=_SYSTEM)
    ] = "",
    concurrency: Annotated[
        str, typer.Option(help="Open requests at a time; several: 1,8.", rich_help_panel=_WORK)
    ] = "",
    rate: Annotated[str, typer.Option(help="Poisson arrivals per second; several: 0.5,2.", rich_help_panel=_WORK)] = "",
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSONL with messages, text or token_ids.", show_default="the held-out set", rich_help_panel=_WORK
        ),
    ] = DEFAULT_PROMPTS,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts: chat,code.", rich_help_panel=_WORK)] = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Measured requests a run.", rich_help_panel=_WORK)] = 16,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each run, left out.", rich_help_panel=_WORK)] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.", rich_help_panel=_WORK)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=_WORK)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, arrivals, intervals.", rich_help_panel=_WORK)] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Go on to max-tokens.", rich_help_panel=_WORK)] = False,
    request_timeout_s: Annotated[float, typer.Option(min=0.001, help="Of one request.", rich_help_panel=_WORK)] = 600.0,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare variants; by default the standard set.", rich_help_panel=_COMPARE),
    ] = False,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="name=key:value,... of the cluster, or name=router:host:port, or name=baseline:transformers|"
            "prompt-lookup|plain-loop,dtype:float32|bfloat16. Repeat it; the first is the base.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    variants: Annotated[
        Path | None, typer.Option(help="TOML or JSON, one table a variant.", rich_help_panel=_COMPARE)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every variant.", rich_help_panel=_COMPARE)] = 1,
    idle: Annotated[
        Idle, typer.Option(help="Keep variants up between turns, or restart them.", rich_help_panel=_COMPARE)
    ] = Idle.KEEP,
    baseline_threads: Annotated[
        int, typer.Option(min=0, help="Threads of each baseline; 0: all cores.", rich_help_panel=_COMPARE)
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
) -> None:
    """Send prompts to a router, or to a cluster started for the purpose, and report what clients see."""
    if context.invoked_subcommand is not None:
        return
    console = Console()
    try:
        prompt_set = read_prompts(prompts, _words(kinds))
        plan = Plan(
            loads=_loads(concurrency, rate, seed),
            rounds=rounds,
            num_requests=num_requests,
            warmup=warmup,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            timeout_s=request_timeout_s,
            idle=idle,
        )
        chosen = _variants(compare, variant or [], variants, router)
        contestants, facts = make_contestants(
            chosen,
            _clusters(chosen, model, cluster),
            model=model,
            baseline_threads=baseline_threads,
            access=Access(token),
        )
        result = run_bench(contestants, facts, plan, prompt_set, Console(stderr=True))
    except GraftlineError as error:
        raise _said(error) from error
    show(console, result)
    if output is not None:
        write_result(output, result)
        console.print(f"written to {output}", markup=False)
    if any(summary.num_failed == summary.num_requests for summary in result.summaries):
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result files.")],
    document: Annotated[
        Path | None, typer.Option(help="Markdown file whose blocks <!-- bench: FILE --> … <!-- end --> are refilled.")
    ] = None,
) -> None:
    """Render results as Markdown tables with the commands that made them."""
    try:
        if document is None:
            for path in results:
                typer.echo(render(read_result(path)))
        else:
            typer.echo(f"{document}: {', '.join(update_document(document, results))}")
    except GraftlineError as error:
        raise _said(error) from error


@app.command()
def plot(
    results: Annotated[list[Path], typer.Argument(help="Result files.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("plots"),
    form: Annotated[PlotFormat, typer.Option("--format", help="Pictures, or one page of them.")] = PlotFormat.PNG,
) -> None:
    """Draw distributions, accept lengths and a request's timeline (needs the extra `bench`)."""
    try:
        for path in results:
            for written in write_plots(read_result(path), out, path.stem, form):
                typer.echo(written)
    except GraftlineError as error:
        raise _said(error) from error


def run_bench(
    contestants: list[Contestant], facts: list[VariantFacts], plan: Plan, prompts: PromptSet, console: Console
) -> BenchResult:
    """Measures and puts the result together; progress goes to `console`.

    An interrupt ends it early: what whole rounds there are become the result.

    Raises:
        GraftlineError: a variant could not be started.
        KeyboardInterrupt: interrupted before the first round was whole.
    """
    started_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    total = len(contestants) * plan.rounds * len(plan.loads) * plan.num_requests
    with ProgressWatcher(console, total) as watcher:
        runs: list[Run] = []
        method = plan.method
        try:
            asyncio.run(measure(contestants, plan, prompts, watcher, into=runs))
        except KeyboardInterrupt:
            runs = whole_rounds(runs, len(contestants), len(plan.loads))
            if not runs:
                raise
            method += f"; interrupted, {runs[-1].round + 1} rounds were whole"
        several = len(contestants) > 1
        return BenchResult(
            command=command_line(),
            started_at=started_at,
            method=method,
            machine=machine_facts(),
            workload=_workload(plan, prompts),
            variants=tuple(facts),
            runs=tuple(runs),
            summaries=tuple(summarise_runs(group) for group in _grouped(runs)),
            ratios=tuple(ratios(runs, seed=plan.seed)) if several else (),
            same_outputs=tuple(same_outputs(runs)) if several else (),
        )


def _said(error: GraftlineError) -> typer.Exit:
    """Says what went wrong; exit status 2 for bad input, 1 for the rest, as every command."""
    Console(stderr=True).print(f"graftline bench: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(2 if isinstance(error, InvalidRequestError) else 1)


def _workload(plan: Plan, prompts: PromptSet) -> Workload:
    return Workload(
        prompts=prompts.name,
        prompts_sha256=prompts.sha256,
        kinds=prompts.kinds,
        num_requests=plan.num_requests,
        warmup=plan.warmup,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=plan.seed,
        ignore_eos=plan.ignore_eos,
        rounds=plan.rounds,
    )


def _grouped(runs: list[Run]) -> list[list[Run]]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.variant), []).append(run)
    return list(groups.values())


def _variants(compare: bool, named: list[str], path: Path | None, router: str | None) -> list[Variant]:
    chosen = [*(read_variants(path) if path else []), *(parse_variant(text) for text in named)]
    if router is not None:
        chosen.insert(0, Variant("router", {"router": router}))
    if compare and not chosen:
        chosen = list(STANDARD_VARIANTS)
    if compare and len(chosen) < 2:
        raise InvalidRequestError("variant", "comparing takes at least two variants")
    check_names(chosen)
    return chosen or [Variant("default", {})]


def _clusters(variants: Sequence[Variant], model: str, settings: str) -> Clusters:
    """Imports what starts clusters only when a variant needs one: a client machine may have no engine."""
    if all(variant.kind is not VariantKind.CLUSTER for variant in variants):
        return NoClusters()
    from graftline.bench.cluster import LocalClusters

    return LocalClusters(model, parse_settings(settings))


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _positive(field: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequestError(field, f"{word!r} is not a positive number")
    return value


def _count(field: str, word: str) -> int:
    value = _positive(field, word)
    if value != int(value):
        raise InvalidRequestError(field, f"{word!r} is not a whole number")
    return int(value)


def _loads(concurrency: str, rate: str, seed: int) -> list[Load]:
    loads: list[Load] = [Concurrency(_count("concurrency", word)) for word in _words(concurrency)]
    loads += [PoissonRate(_positive("rate", word), seed) for word in _words(rate)]
    return loads or [Concurrency(1)]
