"""How a measurement shows itself on a terminal: progress while it runs, tables when it is over."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from graftline.bench.compare import Watcher
from graftline.bench.records import BenchResult, RequestRecord
from graftline.bench.report import RATIO_HEADINGS, failures, idle_use, ratio_cells, summary_cells, summary_headings


class ProgressWatcher(Watcher):
    """One bar over all requests, with what is being done beside it; where there is no terminal, a line a step."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_requests)
        self._num_failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def starting(self, variant: str) -> None:
        """See `Watcher`."""
        self._say(f"starting {variant}")

    def running(self, variant: str, load: str, round_number: int, num_requests: int) -> None:
        """See `Watcher`."""
        self._say(f"round {round_number + 1}: {variant}, {load}")

    def done(self, record: RequestRecord) -> None:
        """See `Watcher`."""
        self._num_failed += not record.ok
        self._progress.advance(self._task)

    def _say(self, text: str) -> None:
        failed = f" ([red]{self._num_failed} failed[/red])" if self._num_failed else ""
        self._progress.update(self._task, description=escape(text) + failed)
        if not self._console.is_terminal:
            self._console.print(escape(text) + failed)


def show(console: Console, result: BenchResult) -> None:
    """Prints the tables of a result."""
    for load in dict.fromkeys(summary.load for summary in result.summaries):
        # A row per figure: terminals are narrow, and variants are few.
        columns = [summary_headings(), *(summary_cells(entry) for entry in result.summaries if entry.load == load)]
        headings, *rows = ([*cells] for cells in zip(*columns, strict=True))
        console.print(_table(load, headings, [row for row in rows if set(row[1:]) != {"-"}]))
        if found := [ratio for ratio in result.ratios if ratio.load == load]:
            rows = [ratio_cells(ratio) for ratio in found]
            console.print(_table(f"{load}, ratios against {found[0].base}", RATIO_HEADINGS, rows))
    for same in result.same_outputs:
        console.print(
            f"{escape(same.variant)}, {same.load}: {same.num_same} of {same.num_compared} outputs equal "
            f"{escape(same.base)}'s token for token"
        )
    if said := idle_use(result):
        console.print(said)
    for line in failures(result):
        console.print(escape(line), style="red")


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
