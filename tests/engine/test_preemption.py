"""Whatever a request asks for, and whatever else happens, holds over its preemptions: it goes on in the middle."""

from pathlib import Path
from random import Random

import pytest
from faulty_port import Fault
from local_pair import Ask, Call, End, Event, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.request import FinishReason, Sampling
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


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_the_context_ends_where_it_ends(world: TinyWorld, tmp_path: Path, every: int, page_size: int) -> None:
    """CASES S53: also for prompts that leave room for one token, and for requests that are preempted just before."""
    head = write_tiny_head(tmp_path / "head", world.short.path)
    asks = [Ask(token_ids=prompt(length), max_tokens=100) for length in (40, 55, 60, 61, 62, 63)]
    with local_pair(
        world.short.path,
        head,
        tree=TreeShape(4, 2, 8),
        num_pages=512 // page_size,
        page_size=page_size,
        decode_split=(1, 3),
        decode={"preempt_every": every},
    ) as pair:
        answers = pair.run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.short.answer(ask.token_ids, 64 - len(ask.token_ids))
        assert answer.reason is FinishReason.LENGTH


@pytest.mark.parametrize(("every", "device_rounds"), [(0, False), (5, False), (5, True)])
def test_cancels_failed_writes_and_preemptions_together(world: TinyWorld, every: int, device_rounds: bool) -> None:
    """CASES B52: whatever meets whatever, nobody gets a wrong token and nothing is left."""
    draw = Random(every)

    def hook(call: Call, event: Event) -> None:
        if draw.random() < 0.06:
            call.cancel()

    asks = [
        Ask(token_ids=prompt(draw.choice((1, 4, 7, 17, 33)), seed % 7), max_tokens=draw.randrange(1, 30), on_event=hook)
        for seed in range(60)
    ]
    with local_pair(
        world.plain.path,
        world.eagle,
        tree=TreeShape(3, 1, 4),
        prefill_split=(2, 2),
        decode_split=(1, 2, 1),
        num_pages=48,
        chunk_tokens=8,
        prefill={"max_running": 5},
        decode={
            "max_running": 6,
            "num_pages": 30,
            "preempt_every": every,
            "device_rounds": device_rounds,
            "overlap": device_rounds,
        },
    ) as pair:
        pair.network.rule = lambda order, stage: Fault("reset", drained=True) if draw.random() < 0.05 else None
        answers = pair.run(asks, concurrency=14)
    for ask, answer in zip(asks, answers, strict=True):
        wanted = world.plain.answer(ask.token_ids, ask.max_tokens)
        assert answer.ids == wanted[: len(answer.ids)]
        assert answer.end is not End.FINISHED or answer.ids == wanted
    assert {answer.end for answer in answers} == set(End)
