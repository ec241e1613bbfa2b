"""Contract 1: whatever the stages, trees, pages and company, output is that of the plain model, token for token."""

from itertools import product

import pytest
from local_pair import Ask, End, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.pages import num_pages_for
from graftline.engine.request import FinishReason, Sampling, TreeOrigin
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

CHUNK = 16
SHAPES = (TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(4, 2, 8), NO_SPECULATION)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20)
# 1, page and chunk of 16 with neighbours, several chunks; pages of 1 make every length a page's end.
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1, 3 * CHUNK, 7)
NEW_TOKENS = 10


def name_of(shape: object) -> str:
    return f"{shape.depth}-{shape.branching}-{shape.nodes}" if isinstance(shape, TreeShape) else str(shape)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("decode_split", [(4,), (3, 1), (1, 2, 1)], ids=len)
@pytest.mark.parametrize("prefill_split", [(4,), (1, 3)], ids=len)
def test_output_is_that_of_the_plain_model(
    world: TinyWorld, prefill_split: tuple[int, ...], decode_split: tuple[int, ...], shape: TreeShape, page_size: int
) -> None:
    """CASES A15, A17, P07, P14, P15, S36: alone and eight at once, greedy and seeded."""
    head = world.eagle3 if shape.branching > 1 else world.eagle
    samplings = (Sampling(), SEEDED)
    # Every cell takes its own part of lengths alone, and all lengths at once.
    cell = len(prefill_split) + len(decode_split) + shape.nodes
    with local_pair(
        world.plain.path,
        head if shape.speculates else None,
        tree=shape,
        prefill_split=prefill_split,
        decode_split=decode_split,
        page_size=page_size,
        num_pages=512 // page_size,
        chunk_tokens=CHUNK,
    ) as pair:
        alone = Ask(token_ids=prompt(LENGTHS[cell % len(LENGTHS)]), max_tokens=NEW_TOKENS, sampling=samplings[cell % 2])
        together = [
            Ask(token_ids=prompt(length), max_tokens=NEW_TOKENS, sampling=samplings[index % 2])
            for index, length in enumerate(LENGTHS)
        ]
        answers = [*pair.run([alone]), *pair.run(together)]
    for ask, answer in zip([alone, *together], answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, NEW_TOKENS, ask.sampling)
        assert (answer.end, answer.reason) == (End.FINISHED, FinishReason.LENGTH)
        assert answer.origins == [TreeOrigin.REAL if shape.speculates else TreeOrigin.NONE]


@pytest.mark.parametrize(("chunk_tokens", "page_size"), [(24, 16), (5, 4), (1, 2), (64, 8), (7, 16)])
def test_chunks_and_pages_need_not_fit_each_other(world: TinyWorld, chunk_tokens: int, page_size: int) -> None:
    """CASES A12, S23: chunks that end within a page, prompts that end at or beside a page's end."""
    lengths = (15, 16, 17, 23, 24, 25, 47, 48, 49)
    with local_pair(
        world.plain.path, world.eagle, chunk_tokens=chunk_tokens, page_size=page_size, decode_split=(2, 2)
    ) as pair:
        answers = pair.run([Ask(token_ids=prompt(length), max_tokens=6) for length in lengths], concurrency=3)
    assert [answer.ids for answer in answers] == [world.plain.answer(prompt(length), 6) for length in lengths]
    for answer, length in zip(answers, lengths, strict=True):
        assert answer.handoffs[0].chunks >= -(-length // chunk_tokens)
    page_bytes = {
        answer.handoffs[0].num_bytes / num_pages_for(length, page_size)
        for answer, length in zip(answers, lengths, strict=True)
    }
    assert len(page_bytes) == 1, "every page is sent once"


def test_bfloat16_is_as_exact(world: TinyWorld) -> None:
    """Weights and KV in bfloat16: the same tokens as plain bfloat16, alone, together, over stages."""
    for shape, sampling in product((TreeShape(3, 1, 4), TreeShape(4, 2, 8)), (Sampling(), SEEDED)):
        with local_pair(
            world.plain.path, world.eagle, tree=shape, dtype="bfloat16", prefill_split=(2, 2), decode_split=(1, 3)
        ) as pair:
            asks = [Ask(token_ids=prompt(length), max_tokens=12, sampling=sampling) for length in (3, 16, 17, 40)]
            answers = pair.run(asks)
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.ids == world.plain_bf16.answer(ask.token_ids, 12, sampling)


def test_long_generation_stays_on_the_plain_path(world: TinyWorld) -> None:
    """CASES S36: long outputs from trees whose drafts hold now and then, so that rollback runs at many offsets."""
    with local_pair(world.plain.path, world.eagle, tree=TreeShape(4, 4, 24), decode_split=(2, 2)) as pair:
        answers = pair.run([Ask(token_ids=prompt(12, seed), max_tokens=60) for seed in range(3)])
    for seed, answer in enumerate(answers):
        assert answer.ids == world.plain.answer(prompt(12, seed), 60)
    assert sum(answer.total.accepted for answer in answers) > 0


def test_a_seed_alone_decides(world: TinyWorld) -> None:
    """CASES S09: alone five times, with seven others, in another order: identical. S11: other seeds, other output."""
    wild = [Sampling(temperature=2.0, seed=seed) for seed in range(42, 50)]
    asks = [Ask(token_ids=prompt(9), max_tokens=10, sampling=sampling) for sampling in wild]
    with local_pair(world.plain.path, world.eagle, decode_split=(2, 2)) as pair:
        alone = [pair.run([asks[0]])[0].ids for _ in range(5)]
        together = pair.run(asks)
        reversed_order = pair.run(asks[::-1])
    assert all(ids == world.plain.answer(prompt(9), 10, wild[0]) for ids in alone)
    assert together[0].ids == alone[0] == reversed_order[-1].ids
    assert len({tuple(answer.ids) for answer in together}) == len(asks)


def test_a_prefill_without_real_trees_changes_only_the_first_round(world: TinyWorld) -> None:
    """The root-only tree is lossless and drafts nothing in the first round."""
    with local_pair(world.markov.path, world.agrees, tree=TreeShape(3, 1, 4)) as pair:
        real = pair.generate(prompt(5), 14)
        asked = pair.generate(prompt(5), 14, real_tree=False)
    with local_pair(world.markov.path, world.agrees, tree=TreeShape(3, 1, 4), prefill={"real_trees": False}) as pair:
        configured = pair.generate(prompt(5), 14)
    assert real.origins == [TreeOrigin.REAL]
    assert real.speculation[0].first_round_accepted == 3
    for cold in (asked, configured):
        assert real.ids == cold.ids == world.markov.answer(prompt(5), 14)
        assert cold.origins == [TreeOrigin.ROOT_ONLY]
        assert cold.speculation[0].first_round_drafted == 0
