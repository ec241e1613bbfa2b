"""Pictures: what they draw, not how they look."""

import re
import sys
from pathlib import Path

import msgspec
import pytest
from bench_records import record, result, run
from typer.testing import CliRunner

from graftline.bench.cli import app
from graftline.bench.plots import PlotFormat, draw, write_plots
from graftline.bench.records import Speculation, write_result
from graftline.errors import IncompatibleError, InvalidRequestError

LOAD = "concurrency 1"


def test_distributions_are_the_values_in_order() -> None:
    figure = draw(result(), LOAD)["tpot"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"real", "root-only"}
    assert list(lines["root-only"].get_xdata()) == pytest.approx([100, 100, 100])
    assert list(lines["root-only"].get_ydata()) == pytest.approx([0, 0.5, 1])
    assert list(lines["real"].get_xdata()) == pytest.approx([50, 50, 50])


def test_the_timeline_is_one_request_that_all_variants_finished() -> None:
    failed = record([], error="INTERNAL", prompt_id="broken")
    made = msgspec.structs.replace(
        result(),
        runs=(
            run([record(prompt_id="broken"), record([(0.1, 1), (0.2, 3)], prompt_id="shown")], variant="a"),
            run([failed, record([(0.3, 2)], prompt_id="shown")], variant="b"),
        ),
    )
    axes = draw(made, LOAD)["timeline"].axes[0]
    assert "shown" in axes.get_title()
    (first, second) = axes.lines
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([0, 0.1, 0.2], [0, 1, 4])
    assert (list(second.get_xdata()), list(second.get_ydata())) == ([0, 0.3], [0, 2])


def test_accept_lengths_are_counted_where_something_was_drafted() -> None:
    drafted, plain = Speculation(rounds=2, drafted=6, accepted=2), Speculation(rounds=5)
    made = msgspec.structs.replace(
        result(),
        runs=(
            run([record(speculation=drafted)] * 3, variant="eagle"),
            run([record(speculation=plain)] * 3, variant="off"),
        ),
    )
    axes = draw(made, LOAD)["accept"].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["eagle"]
    heights = {round(bar.get_x(), 1): bar.get_height() for bar in axes.patches if bar.get_height()}
    assert list(heights.values()) == [3]
    assert 2.0 <= next(iter(heights)) < 2.25


def test_what_would_be_empty_is_not_drawn() -> None:
    single = msgspec.structs.replace(result(), runs=(run([record([(0.1, 1)])]),))
    assert set(draw(single, LOAD)) == {"ttft", "timeline"}
    failed = msgspec.structs.replace(result(), runs=(run([record([], error="INTERNAL")]),))
    assert draw(failed, LOAD) == {}
    with pytest.raises(InvalidRequestError, match="no request of it finished"):
        write_plots(failed, Path("nowhere"), "r", PlotFormat.PNG)


def test_pictures_are_written_as_files(tmp_path: Path) -> None:
    paths = write_plots(result(), tmp_path / "out", "r", PlotFormat.PNG)
    assert [path.name for path in paths] == [
        f"r-concurrency-1-{name}.png" for name in ("ttft", "tpot", "accept", "timeline")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_page_holds_everything_and_escapes_the_command(tmp_path: Path) -> None:
    made = msgspec.structs.replace(result(), command="bench <script>")
    write_result(tmp_path / "r.json", made)
    done = CliRunner().invoke(
        app, ["plot", str(tmp_path / "r.json"), "--out", str(tmp_path / "out"), "--format", "html"]
    )
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "r.html").read_text()
    assert "bench &lt;script&gt;" in page
    assert len(re.findall(r'<img alt="[^"]+" src="data:image/png;base64,iVBOR', page)) == 4
    assert not re.findall(r'(?:src|href)="http', page)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(IncompatibleError, match=r"pip install 'graftline\[bench\]'"):
        draw(result(), LOAD)
