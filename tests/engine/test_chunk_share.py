"""How a prefill step is shared between prompts."""

from random import Random

import pytest

from graftline.engine.chunk_share import share_chunk


@pytest.mark.parametrize(
    ("remaining", "budget", "shares"),
    [
        ([], 8, []),
        ([5], 8, [5]),
        ([50], 8, [8]),
        ([50, 3], 8, [5, 3]),  # a short one goes along with a long one
        ([50, 30, 3], 8, [4, 1, 3]),
        ([50, 6], 8, [4, 4]),
        ([20, 20, 20], 8, [8, 0, 0]),  # equals in order
        ([3, 20, 10], 8, [3, 0, 5]),
        ([3, 10, 10], 8, [3, 5, 0]),
        ([7, 1], 1, [1, 0]),
    ],
)
def test_shares(remaining: list[int], budget: int, shares: list[int]) -> None:
    assert share_chunk(remaining, budget) == shares


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_full_and_the_oldest_gets_on(seed: int) -> None:
    draw = Random(seed)
    for _ in range(200):
        remaining = [draw.choice((1, 2, 7, 8, 9, 100)) for _ in range(draw.randrange(1, 9))]
        budget = draw.choice((1, 2, 7, 16, 64))
        shares = share_chunk(remaining, budget)
        assert all(0 <= share <= need for share, need in zip(shares, remaining, strict=True))
        assert sum(shares) == min(budget, sum(remaining))
        assert shares[0] >= min(remaining[0], budget - budget // 2)


def steps_until_done(prompts: list[int], budget: int) -> list[int]:
    """Steps that each prompt takes from the common start, all of them being there at once."""
    remaining, done, step = dict(enumerate(prompts)), [0] * len(prompts), 0
    while remaining:
        step += 1
        shares = share_chunk(list(remaining.values()), budget)
        for index, share in zip(list(remaining), shares, strict=True):
            remaining[index] -= share
            if remaining[index] == 0:
                done[index] = step
                del remaining[index]
    return done


def test_what_a_long_prompt_costs_short_ones_and_they_it() -> None:
    """A prompt of 64 chunks before eight of half a chunk: served in order, these would wait for 64 to 68 steps."""
    long, *short = steps_until_done([64 * 256, *[128] * 8], 256)
    assert short == [1, 2, 3, 4, 5, 6, 7, 8]
    assert long == 68
    assert steps_until_done([512] * 4, 256) == [2, 4, 6, 8], "equal ones wait no longer than in order of arrival"
