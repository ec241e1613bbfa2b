"""Results on disk, and the tables made of them."""

from pathlib import Path

import msgspec
import pytest
from bench_records import result

from graftline.bench.machine import command_line, machine_facts
from graftline.bench.records import read_result, write_result
from graftline.bench.report import number, render, update_document
from graftline.errors import InvalidRequestError


def test_a_result_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    write_result(path, result())
    assert read_result(path) == result()
    assert [entry.name for entry in path.parent.iterdir()] == ["r.json"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for content, said in (
        (b"{", "no benchmark result"),
        (b"[]", "schema None"),
        (b'{"schema": "graftline.bench/0"}', "graftline.bench/0"),
        (b'{"schema": "graftline.bench/1"}', "no benchmark result"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidRequestError, match=said):
            read_result(path)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_result(tmp_path / "none.json")


def test_a_report_has_the_command_the_machine_and_the_figures() -> None:
    text = render(result())
    assert "```\ngraftline bench --compare\n```" in text
    assert f"{machine_facts().num_cores} cores" in text
    assert "* `real`: initial_tree real" in text
    assert "* `root-only`: defaults" in text
    row = next(line for line in text.splitlines() if line.startswith("| root-only | 5.00"))
    # tokens/s, TTFT mean and p99, TPOT mean and p99 of 5 tokens in 0.1 + 0.4 s.
    assert row.startswith("| root-only | 5.00 | 100.0 | 100.0 | 100.0 | 100.0 |")
    assert "| root-only | TPOT mean | 2.000 | 2.000 … 2.000 | 100.0 ms | 50.0 ms |" in text
    assert "| root-only | first-round accept length | 0.333 |" in text
    assert "equal to `real`'s, token for token: root-only 2/2." in text
    assert "Idle variants used 0.00 cores at most" in text
    assert "failed" not in text


def test_failed_requests_are_listed_up_to_a_bound() -> None:
    text = render(result(failed=7))
    assert "28 requests failed:" in text
    assert "* real, concurrency 1, round 0, bad-0: UNAVAILABLE gone" in text
    assert "* and 8 more" in text
    assert "| 2/16 |" in text


def test_a_documents_blocks_are_refilled_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_result(path, result())
    document = tmp_path / "results.md"
    two = "<!-- bench: two.json -->\nkept\n<!-- end -->\nfoot\n"
    document.write_text(f"# Title\n<!-- bench: one.json -->\nold\n<!-- end -->\n{two}")
    assert update_document(document, [path]) == ["one.json"]
    once = document.read_text()
    assert once.startswith("# Title\n<!-- bench: one.json -->\n```\ngraftline bench")
    assert once.endswith(f"<!-- end -->\n{two}")
    assert "old" not in once
    update_document(document, [path])
    assert document.read_text() == once


def test_a_result_without_a_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_result(path, result())
    document = tmp_path / "results.md"
    with pytest.raises(InvalidRequestError, match="cannot read"):
        update_document(document, [path])
    document.write_text("nothing here\n")
    with pytest.raises(InvalidRequestError, match=r"no line <!-- bench: one\.json -->"):
        update_document(document, [path])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "ms", "-"), (0.0123, "ms", "12.3"), (1.5, "ms", "1500"), (0.00123, "ms", "1.23"), (2.345, "", "2.35")],
)
def test_figures_are_short(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_facts_about_this_machine_are_facts() -> None:
    facts = machine_facts()
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 1 << 28
    assert "grpcio" in facts.packages
    assert facts.commit
    assert command_line()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=type(facts)) == facts
