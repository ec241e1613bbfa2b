"""The kernel measurement's own logic, on CPU: what counts as a failure, and that one failure hides no other item."""

import time

import pytest
import torch

from graftline.bench import gpu_kernels
from graftline.bench.gpu_kernel_checks import list_checks, relative
from graftline.bench.gpu_kernel_items import Item, tree_round
from graftline.bench.gpu_kernel_layers import LayerSizes, time_layers
from graftline.bench.gpu_kernels import Child, describe, measure, run_item


def test_names_are_unique() -> None:
    for phase in ("checks", "times"):
        names = [item.name for item in gpu_kernels.items_of(phase)]
        assert len(set(names)) == len(names)


def test_relative_errors() -> None:
    ones = torch.ones(4)
    assert relative(ones, ones) == 0
    assert relative(1.5 * ones, ones) == pytest.approx(0.5)
    assert relative(torch.full((4,), torch.nan), ones) == float("inf")
    assert relative(torch.ones(3), ones) == float("inf")


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"error": 0.1, "bound": 0.2}, "PASS"),
        ({"error": 0.3, "bound": 0.2}, "FAIL"),
        ({"error": float("nan"), "bound": 0.2}, "FAIL"),
    ],
)
def test_a_result_above_its_bound_fails(found: dict[str, float], status: str) -> None:
    answer = run_item(Item("one", lambda warm_up: dict(found)), warm_up=False)
    assert answer["status"] == status
    assert describe("checks", "one", answer).startswith(f"{status} one: error")


def test_what_raises_fails_with_its_reason() -> None:
    def broken(warm_up: bool) -> dict[str, object]:
        raise RuntimeError("no such kernel")

    answer = run_item(Item("one", broken), warm_up=False)
    assert answer["status"] == "FAIL"
    assert "no such kernel" in describe("checks", "one", answer)


def test_a_small_check_passes_on_cpu_and_bfloat16_fails_there() -> None:
    items = {item.name: item for item in list_checks()}
    assert run_item(items["compact_kv"], warm_up=False)["status"] == "PASS"
    assert run_item(items["silu_mul bf16 1"], warm_up=False)["status"] == "FAIL"


def test_a_round_is_laid_out_as_described() -> None:
    batch, pages = tree_round([5, 0], [(-1, 0, 0), ()], 3, 4, 16)
    assert pages == 8
    assert batch.positions.tolist() == [5, 6, 6, 0, 0, 0]
    assert batch.visible.tolist() == [1, 3, 5, 0, 0, 0]
    assert (batch.row_slots >= 0).tolist() == [True] * 3 + [False] * 3
    first_page = int(batch.page_tables[0, 1])
    assert batch.row_slots[:3].tolist() == [first_page * 4 + offset for offset in (1, 2, 3)]


def test_what_rounds_use_comes_first() -> None:
    names = ["a 1", "c", "b 1", "b 2", "a 2"]
    assert gpu_kernels._split(names, "", ("b", "a 1")) == ([2, 3, 0], [1, 4])
    assert gpu_kernels._split(names, "1", ("b",)) == ([2], [0])
    for phase, first in (("checks", gpu_kernels._FIRST_CHECKS), ("times", gpu_kernels._FIRST_TIMES)):
        known = [item.name for item in gpu_kernels.items_of(phase)]
        assert all(any(part in name for name in known) for part in first), "a part that no item has"


def test_layers_are_timed() -> None:
    found = time_layers(LayerSizes(32, 48, 4, 2, 16), 2, 3, 20, 2, warm_up=False)
    assert set(found["microseconds"]) == {"a layer"}
    assert found["bytes"] == 2 * (32 * (12 * 16 + 3 * 48) + 3 * 20 * 2 * 2 * 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bfloat16 checks fail on CPU alone")
@pytest.mark.slow
def test_children_answer_in_turn_and_are_outlived() -> None:
    found = measure("silu_mul", 1, time.monotonic() + 120)
    answers = found["checks"]
    assert len(answers) == 8
    assert all((answer["status"] == "FAIL") == ("bf16" in name) for name, answer in answers.items())
    assert len(found["failures"]) == 4


@pytest.mark.slow
def test_a_dead_child_is_a_failure_of_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels.sys, "executable", "/bin/false")
    child = Child("checks", warm_up=False)
    child._process.wait(10)
    answer = child.ask(0)
    assert answer is None or answer["status"] == "FAIL"
    child.stop()
