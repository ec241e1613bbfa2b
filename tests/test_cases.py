"""docs/cases.md names tests that exist and that name their row, and leaves out no row that a test names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "cases.md").read_text()
LISTED = [row for line in re.findall(r"^Rows: (.+)$", TEXT, re.MULTILINE) for row in line.split()]
ROWS: dict[str, str] = dict(re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \| ([^|]+) \|$", TEXT, re.MULTILINE))


@cache
def docstrings(file: str) -> dict[str, str]:
    """What the tests of a file say of themselves, by name."""
    functions = (
        node
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )
    return {function.name: ast.get_docstring(function) or "" for function in functions}


def test_every_row_is_there_once() -> None:
    found = re.findall(r"^\| ([A-Z]\d\d) \|", TEXT, re.MULTILINE)
    assert found == LISTED == list(ROWS)
    assert len(set(LISTED)) == len(LISTED) == 164


@pytest.mark.parametrize("row", LISTED)
def test_the_tests_of_a_row_exist_and_name_it(row: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", ROWS[row])
    assert named, f"{row} has no test"
    for file, test in named:
        assert test in docstrings(file), f"{row}: no {test} in {file}"
        assert re.search(rf"\b{row}\b", docstrings(file)[test]), f"{file}::{test} does not name {row}"


def test_rows_that_tests_name_are_known() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        for sentence in re.findall(r"CASES((?:,? [A-Z]\d\d)+)", path.read_text()):
            assert set(re.findall(r"[A-Z]\d\d", sentence)) <= set(LISTED), f"{path}: {sentence}"
