"""Requests of every kind at once, over drawn splits, trees, pools and preemptions, against each decoded alone."""

import random
from dataclasses import replace

import pytest
from local_pair import Ask, Call, End, local_pair
from tiny_world import EOS, TinyWorld, prompt

from graftline.engine.request import Sampling
from graftline.engine.service_api import Tokens
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

SHAPES = (TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(4, 2, 8), TreeShape(3, 3, 12), NO_SPECULATION)
IDS = range(250)


def drawn_sampling(draw: random.Random) -> Sampling:
    sampling = Sampling()
    if draw.random() < 0.6:
        sampling = Sampling(
            temperature=draw.choice([0.5, 0.8, 1.2]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 0, 5, 40]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            seed=draw.randrange(1 << 40),
        )
    if draw.random() < 0.3:
        sampling = replace(sampling, logit_bias={draw.choice(IDS): draw.choice([-100.0, 3.0]), draw.choice(IDS): 4.0})
    return sampling


def drawn_ask(draw: random.Random) -> Ask:
    max_tokens = draw.choice([1, 2, 3, 7, 18, 30, 44])
    ends = {EOS, *draw.sample(IDS, draw.choice([0, 3, 20, 60]))} if draw.random() < 0.6 else ()
    return Ask(
        token_ids=prompt(draw.choice([1, 2, 4, 7, 15, 16, 17, 33, 40]), draw.randrange(5)),
        max_tokens=max_tokens,
        sampling=drawn_sampling(draw),
        eos_ids=frozenset(ends),
        stop_ids=frozenset(draw.sample(IDS, 5) if draw.random() < 0.2 else ()),
        min_tokens=draw.randrange(max_tokens + 1) if draw.random() < 0.3 else 0,
        logprobs=draw.choice([0, 1, 3]) if draw.random() < 0.3 else None,
    )


def leave_early(call: Call, event: object) -> None:
    if isinstance(event, Tokens):
        call.cancel()


@pytest.mark.parametrize("seed", range(24))
def test_requests_of_all_kinds_do_not_change_each_other(world: TinyWorld, seed: int) -> None:
    """CASES S54: tokens, reasons and logprobs to the last bit, whichever rounds a request shares with which others."""
    draw = random.Random(seed)
    asks = [drawn_ask(draw) for _ in range(draw.choice([2, 5, 9]))]
    leaves = [draw.random() < 0.15 for _ in asks]
    shape = draw.choice(SHAPES)
    head = None if not shape.speculates else world.eagle3 if shape.branching > 1 else world.eagle
    decode = {
        "device_rounds": draw.random() < 0.8,
        "overlap": draw.random() < 0.8,
        "max_running": draw.choice([1, 2, 4, 16]),
        "preempt_every": draw.choice([0, 0, 2, 3, 7]),
        "max_verify_rows": draw.choice([0, 0, 12, 30]),
    }
    with local_pair(world.plain.path, tree=NO_SPECULATION, num_pages=300) as pair:
        alone = pair.run(asks, concurrency=1)
    with local_pair(
        world.plain.path,
        head,
        tree=shape,
        num_pages=draw.choice([30, 40, 300]),
        chunk_tokens=draw.choice([4, 7, 64]),
        prefill_split=draw.choice([(4,), (2, 2)]),
        decode_split=draw.choice([(4,), (3, 1), (1, 2, 1)]),
        decode=decode,
    ) as pair:
        together = pair.run(
            [replace(ask, on_event=leave_early) if leave else ask for ask, leave in zip(asks, leaves, strict=True)]
        )
    for ask, leave, expected, found in zip(asks, leaves, alone, together, strict=True):
        if leave and found.end is End.CANCELLED:
            assert found.ids == expected.ids[: len(found.ids)]
            continue
        assert (found.end, found.reason, found.ids) == (End.FINISHED, expected.reason, expected.ids), ask
        if ask.logprobs is not None:
            assert [token.logprob for token in found.tokens] == [token.logprob for token in expected.tokens], ask
