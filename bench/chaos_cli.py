"""`graftline chaos`: break a cluster on purpose, and see that nobody notices."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from graftline.bench.chaos import TINY, ChaosPlan, ChaosRun
from graftline.bench.chaos_asks import PoolSize
from graftline.bench.chaos_faults import ALL_KINDS, FaultKind, Lane
from graftline.bench.chaos_records import ChaosResult, write_chaos
from graftline.bench.stats import Summary
from graftline.bench.variants import parse_settings, with_settings
from graftline.errors import GraftlineError, InvalidRequestError

app = typer.Typer()
_NO_FAULTS = "none"
_Named = TypeVar("_Named", FaultKind, Lane)


@app.command()
def chaos(
    requests: Annotated[int, typer.Option(min=1, help="Requests to ask.")] = 500,
    soak: Annotated[
        float, typer.Option(min=0, help="Minutes of load without faults, watching memory, descriptors and threads.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of requests and faults.")] = 0,
    model: Annotated[str, typer.Option(help="tiny, or a known name, directory or GGUF file.")] = TINY,
    cluster: Annotated[str, typer.Option(help="Settings of the cluster: key:value,key:value.")] = "",
    callers: Annotated[int, typer.Option(min=1, help="Requests open at a time.")] = 16,
    lanes: Annotated[
        str, typer.Option(help="Whose processes are hurt: prefill,decode,router; or none.")
    ] = "prefill,decode,router",
    faults: Annotated[
        str, typer.Option(help="In which ways, such as kill,freeze-later-stage; empty: in all ways.")
    ] = "",
    transfer_faults: Annotated[
        str, typer.Option(help="What goes wrong with writes, or none.")
    ] = ChaosPlan().transfer_faults,
    pause_s: Annotated[float, typer.Option(min=0, help="Mean pause between faults of one lane.")] = 2.0,
    pace_s: Annotated[float, typer.Option(min=0, help="What a caller waits between two requests.")] = 0.0,
    log_dir: Annotated[Path | None, typer.Option(help="Where processes log.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
) -> None:
    """Kill, freeze and restart processes of a local cluster under load, and check every answer against the plain model.

    Ends with status 1 when a request was lost or answered wrongly, something leaked, or a process needed a hand.
    """
    console = Console(stderr=True)
    try:
        plan = ChaosPlan(
            model=model,
            num_requests=None if soak else requests,
            minutes=soak,
            seed=seed,
            callers=callers,
            lanes=() if soak else _lanes(lanes),
            kinds=_members(FaultKind, faults, "faults") if faults else ALL_KINDS,
            transfer_faults="" if soak or transfer_faults == _NO_FAULTS else transfer_faults,
            pause_s=pause_s,
            pace_s=pace_s,
            soak=bool(soak),
        )
        if model != TINY:
            plan = for_real_model(plan)
        spec = with_settings(plan.cluster, parse_settings(cluster), "cluster.")
        plan = replace(plan, cluster=replace(spec, log_dir=log_dir))
        began_s = time.monotonic()

        def say(line: str) -> None:
            console.print(f"{time.monotonic() - began_s:7.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)

        result = asyncio.run(ChaosRun(plan, say).run())
    except GraftlineError as error:
        console.print(f"graftline chaos: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2 if isinstance(error, InvalidRequestError) else 1) from error
    show(Console(), result)
    if output is not None:
        write_chaos(output, result)
        console.print(f"written to {output}", markup=False)
    if not result.good:
        raise typer.Exit(1)


def for_real_model(plan: ChaosPlan) -> ChaosPlan:
    """The same for a model that is not tiny: fewer plain answers, the model's own page and chunk sizes."""
    cluster = replace(plan.cluster, dtype="bfloat16", page_size=16, pages=128, chunk_tokens=64)
    pool = PoolSize(num_prompts=24, max_prompt_len=160, max_tokens=24)
    return replace(plan, cluster=cluster, pool=pool, callers=min(plan.callers, 6))


def _lanes(text: str) -> tuple[Lane, ...]:
    return () if text == _NO_FAULTS else _members(Lane, text, "lanes")


def _members(kind: type[_Named], text: str, field: str) -> tuple[_Named, ...]:
    try:
        return tuple(kind(word.strip()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise InvalidRequestError(field, f"{text!r}: {error}") from error


def show(console: Console, result: ChaosResult) -> None:
    """Tables of a result."""
    counts = result.counts
    console.print(
        f"{counts.requests} requests in {result.seconds:.0f} s: {counts.finished} finished, {counts.cancelled} left by "
        f"their callers, {counts.lost} lost, {counts.wrong} wrong; {counts.moved} took more than one attempt, "
        f"{counts.resumed} streams resumed; callers called again {counts.caller_retries} times because their router "
        f"went away; {result.transfer_failures} writes failed, {result.quarantines} quarantines",
        highlight=False,
    )
    waits = Table("seconds", "n", "mean", "p50", "p90", "p99")
    for what, summary in (
        ("first token", result.first_token_s),
        ("whole request", result.request_s),
        ("first token, moved requests", result.moved_first_token_s),
        ("longest gap, moved requests", result.gap_s),
        ("cancel to idle decode", result.cancel_s),
    ):
        if summary is not None:
            waits.add_row(what, *_cells(summary))
    console.print(waits)
    if result.faults:
        console.print(_fault_table(result))
    if result.trends:
        trends = Table("process", "MiB first, last, most", "MiB an hour", "descriptors", "threads", "flat")
        for trend in result.trends:
            fds, threads = (f"{low}-{high}, last {last}" for low, high, last in (trend.fds, trend.threads))
            resident = ", ".join(f"{value:.0f}" for value in trend.resident_mib)
            flat = "yes" if trend.flat else "NO"
            trends.add_row(trend.process, resident, f"{trend.mib_per_hour:+.1f}", fds, threads, flat)
        console.print(trends)
    for trouble in result.troubles:
        console.print(f"{trouble.what}: {trouble.detail}", style="red", markup=False, highlight=False)
    console.print("nothing lost, nothing wrong, nothing leaked" if result.good else f"{len(result.troubles)} troubles")


def _fault_table(result: ChaosResult) -> Table:
    table = Table("fault", "n", "noticed p50, p99", "usable again p50, p99", "served again p50, p99")
    for group, count in sorted(result.fault_counts.items()):
        cells = []
        for summaries in (result.noticed_s, result.usable_s, result.served_s):
            found = summaries.get(group)
            cells.append("-" if found is None else f"{found.p50:.2f}, {found.p99:.2f} s")
        table.add_row(group, str(count), *cells)
    return table


def _cells(summary: Summary) -> list[str]:
    return [str(summary.count), *(f"{value:.3f}" for value in (summary.mean, summary.p50, summary.p90, summary.p99))]
