"""The whole system, router to router, answers what the plain one-process model answers, token for token."""

from itertools import product

import pytest
from system import SystemSpec, limited, running_system
from tiny_world import PlainModel, TinyWorld, prompt

from graftline.client import TreeOrigin
from graftline.engine.request import Sampling
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

CHUNK = 16
PAGE = 16
SHAPES = (TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(4, 2, 8), NO_SPECULATION)
DEEPER_FIRST = TreeShape(2, 2, 7, initial_depth=5)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20)
# One token, a page and a chunk (both 16) and their neighbours, several chunks, and ends of pages of 1.
LENGTHS = (1, 2, 7, PAGE - 1, PAGE, PAGE + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 5)
PROMPTS = [prompt(length, seed) for length, seed in product(LENGTHS, range(4))]
NEW_TOKENS = 8


def name_of(shape: TreeShape) -> str:
    return f"S{shape.depth}K{shape.branching}V{shape.nodes}"


def sampling_of(index: int) -> Sampling:
    return SEEDED if index % 4 == 3 else Sampling()


async def assert_parity(spec: SystemSpec, plain: PlainModel, cell: int) -> None:
    """Forty prompts eight at a time, and four of them alone; every fourth one is sampled."""
    assert len(PROMPTS) == 40
    async with running_system(spec) as system:
        together = await limited(
            [system.answer(ids, NEW_TOKENS, sampling_of(index)) for index, ids in enumerate(PROMPTS)], 8
        )
        alone = [(PROMPTS[index], sampling_of(index)) for index in range(cell % 10, 40, 10)]
        one_by_one = await limited([system.answer(ids, NEW_TOKENS, sampling) for ids, sampling in alone], 1)
    for index, (ids, choice) in enumerate(zip(PROMPTS, together, strict=True)):
        assert list(choice.token_ids) == plain.answer(ids, NEW_TOKENS, sampling_of(index)), f"prompt {index}"
        assert choice.finish.usage.completion_tokens == NEW_TOKENS
    for (ids, sampling), choice in zip(alone, one_by_one, strict=True):
        assert list(choice.token_ids) == plain.answer(ids, NEW_TOKENS, sampling)
    expected = TreeOrigin.REAL if spec.tree.speculates else TreeOrigin.NONE
    assert {choice.finish.speculation.tree_origin for choice in together} == {expected}


@pytest.mark.system
@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("decode_split", [(4,), (3, 1), (1, 2, 1)], ids=len)
@pytest.mark.parametrize("prefill_split", [(4,), (1, 3)], ids=len)
async def test_greedy_and_seeded_parity(
    world: TinyWorld, prefill_split: tuple[int, ...], decode_split: tuple[int, ...], shape: TreeShape, page_size: int
) -> None:
    """CASES A15, A17, P07, P14, P15, S23, S36: over gRPC and Mooncake, uneven splits on both sides."""
    spec = SystemSpec(
        model=world.plain.path,
        head=(world.eagle3 if shape.branching > 1 else world.eagle) if shape.speculates else None,
        tree=shape,
        prefill_split=prefill_split,
        decode_split=decode_split,
        page_size=page_size,
        chunk_tokens=CHUNK,
    )
    await assert_parity(spec, world.plain, len(prefill_split) + len(decode_split) + shape.nodes + page_size)


@pytest.mark.system
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
async def test_parity_in_bfloat16(world: TinyWorld, shape: TreeShape) -> None:
    spec = SystemSpec(
        model=world.plain.path,
        head=world.eagle if shape.speculates else None,
        tree=shape,
        prefill_split=(2, 2),
        decode_split=(1, 3),
        dtype="bfloat16",
        chunk_tokens=CHUNK,
    )
    await assert_parity(spec, world.plain_bf16, shape.nodes)


@pytest.mark.system
@pytest.mark.parametrize("decode_split", [(4,), (3, 1)], ids=len)
async def test_parity_with_deeper_first_trees(world: TinyWorld, decode_split: tuple[int, ...]) -> None:
    """Stage processes and messages carry them like any other tree."""
    spec = SystemSpec(world.plain.path, world.eagle3, DEEPER_FIRST, (1, 3), decode_split, chunk_tokens=CHUNK)
    await assert_parity(spec, world.plain, len(decode_split))


@pytest.mark.system
async def test_preemption_changes_nothing(world: TinyWorld) -> None:
    """CASES R01, R03: pages are taken every few rounds; the stream goes on where it was."""
    spec = SystemSpec(world.plain.path, world.eagle, TreeShape(3, 1, 4), decode_split=(2, 2), preempt_every=3)
    await assert_parity(spec, world.plain, 0)
