"""A look at a router as tables for a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from graftline.top_sample import Look, PairRow, Traffic, WorkerRow

MAX_PAIR_ROWS = 12
_BAR_CELLS = 10


def view(look: Look) -> RenderableType:
    """Everything about a look."""
    pools = [_pool(role, [worker for worker in look.workers if worker.role == role]) for role in ("prefill", "decode")]
    headline = Panel(_headline(look), title=f"graftline router {look.router}", title_align="left")
    return Group(headline, *pools, _pairs(look.pairs))


def _headline(look: Look) -> Text:
    text = Text(f"open {look.open_requests}   ")
    if look.traffic is None:
        return text.append(look.problem, "yellow")
    return text.append(traffic_line(look.traffic))


def traffic_line(traffic: Traffic) -> str:
    """A router's traffic in two lines."""
    since = "since it started" if traffic.seconds is None else f"in {traffic.seconds:.0f} s"
    ended = f"{traffic.finished} finished, {traffic.failed} failed or left, {traffic.refused} refused {since}"
    rates = [
        f"requests/s {_number(traffic.requests_per_s, 1)}",
        f"tokens/s {_number(traffic.tokens_per_s, 0)}",
        f"accept length {_number(traffic.accept_length, 2)}",
        f"TTFT p50 {_milliseconds(traffic.first_token_p50_s)} p99 {_milliseconds(traffic.first_token_p99_s)}",
        f"TPOT p50 {_milliseconds(traffic.inter_token_p50_s)} p99 {_milliseconds(traffic.inter_token_p99_s)}",
    ]
    trouble = f"; {traffic.attempts_failed} attempts failed, {traffic.resumed} streams resumed"
    return f"{ended}{trouble if traffic.attempts_failed or traffic.resumed else ''}\n{'   '.join(rates)}"


def _pool(role: str, workers: Sequence[WorkerRow]) -> RenderableType:
    available = sum(worker.available for worker in workers)
    title = f"{role}: {available} of {len(workers)} available"
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    for name in ("worker", "state"):
        table.add_column(name, overflow="fold")
    for name in ("stages", "open", "queued", "running"):
        table.add_column(name, justify="right")
    table.add_column("pages used")
    if role == "decode":
        table.add_column("tokens/s", justify="right")
        table.add_column("accept length", justify="right")
    else:
        table.add_column("tokens queued", justify="right")
    for worker in workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: WorkerRow) -> list[RenderableType]:
    own = (
        [f"{worker.tokens_per_s:.1f}", _number(worker.accept_length, 2)]
        if worker.role == "decode"
        else [str(worker.queued_tokens)]
    )
    state = Text(worker.state, "green") if worker.available else Text(worker.reason or worker.state, "red")
    counts = (worker.num_stages, worker.open_requests, worker.queued, worker.running)
    return [worker.address, state, *map(str, counts), _pages(worker), *own]


def _pages(worker: WorkerRow) -> Text:
    total = worker.pages_total
    if not total:
        return Text("-")
    used = total - worker.pages_free
    cells = round(_BAR_CELLS * used / total)
    text = Text("█" * cells + "░" * (_BAR_CELLS - cells)).append(f" {used}/{total}")
    return text.append(f" {worker.pages_quarantined} quarantined", "yellow") if worker.pages_quarantined else text


def _pairs(pairs: Sequence[PairRow]) -> RenderableType:
    usable = sum(pair.usable for pair in pairs)
    title = f"pairs: {usable} of {len(pairs)} usable"
    table = Table("prefill", "decode", "", title=title, title_justify="left", title_style="bold", expand=True)
    # What does not work comes first.
    for pair in sorted(pairs, key=lambda pair: pair.usable)[:MAX_PAIR_ROWS]:
        table.add_row(pair.prefill, pair.decode, _verdict(pair))
    if len(pairs) > MAX_PAIR_ROWS:
        table.caption = f"and {len(pairs) - MAX_PAIR_ROWS} more"
    return table


def _verdict(pair: PairRow) -> Text:
    if pair.usable:
        return Text("usable", "green")
    if pair.mismatched_fields:
        return Text(f"differ in {', '.join(pair.mismatched_fields)}", "red")
    return Text("one is not available", "yellow")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
