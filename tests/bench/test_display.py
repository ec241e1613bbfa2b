"""What a terminal shows of a result and of its making."""

import io

from bench_records import record, result
from rich.console import Console

from graftline.bench.display import ProgressWatcher, show


def console(is_terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)


def output(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_figures_stand_in_rows_under_their_variants_without_empty_ones() -> None:
    shown = console()
    show(shown, result())
    text = output(shown)
    heading = next(line for line in text.splitlines() if "variant" in line)
    assert [cell.strip() for cell in heading.split("┃")[1:4]] == ["variant", "real", "root-only"]
    cells = [cell.strip() for line in text.splitlines() if "TPOT mean ms" in line for cell in line.split("│")[1:4]]
    assert cells == ["TPOT mean ms", "50.0", "100.0"]
    assert "KV GB/s" not in text
    assert "root-only, concurrency 1: 2 of 2 outputs equal real's token for token" in text
    assert "2.000 … 2.000" in text


def test_failed_requests_are_listed_as_they_are() -> None:
    shown = console()
    show(shown, result(failed=1))
    assert "bad-0: UNAVAILABLE gone" in output(shown)


def test_progress_names_the_run_and_counts_failures() -> None:
    shown = console()
    with ProgressWatcher(shown, 2) as watcher:
        watcher.starting("real")
        watcher.running("real", "concurrency 1", 0, 2)
        watcher.done(record())
        watcher.done(record([], error="INTERNAL"))
        watcher.running("[odd]", "concurrency 8", 1, 2)
        watcher._progress.refresh()
    text = output(shown)
    assert "2/2" in text
    assert "round 2: [odd], concurrency 8 (1 failed)" in text


def test_without_a_terminal_progress_is_one_line_a_step() -> None:
    shown = console(is_terminal=False)
    with ProgressWatcher(shown, 1) as watcher:
        watcher.starting("real")
        watcher.done(record([], error="INTERNAL"))
        watcher.running("real", "concurrency 1", 0, 1)
    assert output(shown) == "starting real\nround 1: real, concurrency 1 (1 failed)\n"
