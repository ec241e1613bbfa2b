"""The steps of an order are what the stand-in and the clock say."""

import pytest

from graftline.bench.order_steps import CASES, Case, measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_measured(case: Case) -> None:
    found = measure(case, 5)
    assert found.to_engine_us > 0
    assert found.from_engine_us > 0
    assert case.copy_us + found.from_engine_us < found.answered_us
    assert 1 <= found.batches <= case.num_orders


def test_small_orders_given_together_share_a_call() -> None:
    assert measure(Case("8", num_orders=8), 5).batches == 1
