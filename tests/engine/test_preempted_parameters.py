"""Whatever a request asks for holds over its preemptions: its next attempt goes on in the middle."""

import pytest
from local_pair import Ask, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.request import Sampling
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

SAMPLED = Sampling(temperature=1.1, top_k=40, seed=9, logit_bias={7: 3.0, 9: -5.0})


def asks() -> list[Ask]:
    return [
        Ask(token_ids=prompt(6), max_tokens=14, logprobs=3),
        Ask(token_ids=prompt(7), max_tokens=14, logprobs=0, sampling=SAMPLED),
        Ask(token_ids=prompt(8), max_tokens=14, min_tokens=7, eos_ids=frozenset(range(200))),
        Ask(token_ids=prompt(9), max_tokens=14, min_tokens=5, stop_ids=frozenset(range(250)), sampling=SAMPLED),
        Ask(
            token_ids=prompt(10),
            max_tokens=14,
            min_tokens=9,
            eos_ids=frozenset(range(50, 250)),
            logprobs=2,
            sampling=SAMPLED,
        ),
    ]


@pytest.mark.parametrize("device_rounds", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_parameters_hold_over_preemptions(world: TinyWorld, every: int, device_rounds: bool) -> None:
    """CASES S51: logprobs, bias, least lengths and ends are those of a run in one piece without drafts."""
    with local_pair(world.plain.path, None, num_pages=128) as pair:
        wanted = pair.run(asks())
    decode = {"preempt_every": every, "device_rounds": device_rounds, "overlap": device_rounds}
    for head, shape in ((world.eagle3, TreeShape(4, 2, 8)), (None, NO_SPECULATION)):
        with local_pair(
            world.plain.path,
            head,
            tree=shape,
            prefill_split=(1, 3),
            decode_split=(1, 2, 1),
            num_pages=128,
            chunk_tokens=5,
            decode=decode,
        ) as pair:
            answers = pair.run(asks())
            assert pair.decode.totals.preemptions > 0
        for whole, pieces in zip(wanted, answers, strict=True):
            assert (pieces.ids, pieces.reason) == (whole.ids, whole.reason)
            for token, expected in zip(pieces.tokens, whole.tokens, strict=True):
                if expected.logprob is None:
                    assert token.logprob is None
                    continue
                assert token.logprob is not None
                assert token.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-4)
                assert [best for best, _ in token.logprob.top] == [best for best, _ in expected.logprob.top]
