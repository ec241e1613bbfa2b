"""Models with recurrent state through the whole system: router, gRPC, Mooncake, stages on both sides."""

from pathlib import Path

import pytest
from hybrid_world import MTP, HybridWorld
from system import SystemSpec, limited, running_system
from tiny_world import prompt

from graftline.engine.request import Sampling
from graftline.engine.tree_shape import TreeShape

SEEDED = Sampling(temperature=0.7, seed=11)


@pytest.mark.asyncio
@pytest.mark.parametrize(("prefill", "decode"), [((4,), (1, 3)), ((1, 3), (3, 1))], ids=str)
async def test_output_is_that_of_the_plain_model(
    tmp_path: Path, prefill: tuple[int, ...], decode: tuple[int, ...]
) -> None:
    """Eight requests that come and go in three slots; chunks end within the convolution's window."""
    world = HybridWorld(tmp_path)
    spec = SystemSpec(
        world.plain.path,
        MTP,
        TreeShape(4, 2, 8),
        prefill_split=prefill,
        decode_split=decode,
        chunk_tokens=5,
        max_running=3,
    )
    wanted = [(prompt(4 + 5 * index), Sampling() if index % 2 else SEEDED) for index in range(8)]
    async with running_system(spec) as system:
        jobs = [system.answer(ids, 12, sampling) for ids, sampling in wanted]
        choices = await limited(jobs, 8)
    for (ids, sampling), choice in zip(wanted, choices, strict=True):
        assert list(choice.token_ids) == world.plain.answer(ids, 12, sampling)
