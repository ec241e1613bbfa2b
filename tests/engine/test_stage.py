"""One stage at work, driven plan by plan: what the drafter's rows hold, and when tokens are told."""

from pathlib import Path

import pytest
import torch
from tiny_world import TinyWorld, prompt
from torch import Tensor

from graftline.engine.config import EngineConfig, Role
from graftline.engine.kv_pool import KvPool
from graftline.engine.models.config import read_config
from graftline.engine.plan import PageChange, Segment, SlotOpening, StepPlan, StepResult, StepTokens
from graftline.engine.request import DraftTree
from graftline.engine.stage_builder import build_stage, captured_layers
from graftline.engine.tree_shape import TreeShape

PAGES = [5, 2, 9, 0, 7, 3, 8, 1, 11, 10]
PAGE_SIZE = 4


class Driver:
    """A worker of one stage with one request in slot 1, without scheduler, threads or links."""

    def __init__(self, model: Path, head: Path, shape: TreeShape) -> None:
        config = EngineConfig(
            model=str(model),
            role=Role.DECODE,
            draft_head=str(head),
            dtype="float32",
            layer_split=(4,),
            page_size=PAGE_SIZE,
            num_pages=12,
            max_running=2,
            tree=shape,
        )
        self.built = build_stage(config, 0)
        self.said: list[StepTokens | StepResult] = []
        self._step = 0
        for pool in (self.built.pools.target, self.draft_pool):
            pool.data.fill_(torch.nan)

    @property
    def draft_pool(self) -> KvPool:
        assert self.built.pools.draft is not None
        return self.built.pools.draft

    def run(self, segment: Segment, *, early_tokens: bool = False) -> StepResult:
        opening = SlotOpening(1, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1)
        first = self._step == 0
        plan = StepPlan(
            self._step,
            0,
            [opening] if first else [],
            [PageChange(1, 0, PAGES)] if first else [],
            [segment],
            early_tokens,
        )
        self._step += 1
        with torch.inference_mode():
            assert self.built.stage.execute(plan, None, self.said.append) is None
        result = self.said[-1]
        assert isinstance(result, StepResult)
        return result

    def prefill(self, ids: list[int], chunks: list[int]) -> StepResult:
        start = 0
        for count in chunks:
            end = start + count
            final = end == len(ids)
            result = self.run(
                Segment(
                    slot=1,
                    start=start,
                    tokens=ids[start:end],
                    parents=None,
                    first_sampled=count - 1 if final else count,
                    next_token=-1 if final else ids[end],
                    accepted=[],
                    grow=final,
                )
            )
            start = end
        return result

    def rows(self, pool: KvPool, count: int) -> Tensor:
        """The first rows of the request in a pool: [count, layers, 2, kv_heads, head_dim]."""
        return pool.data[PAGES].movedim(3, 1).flatten(0, 1)[:count]


def decode(driver: Driver, result: StepResult, committed: int, num_tokens: int) -> tuple[list[int], int]:
    """Rounds from a prefill's result on: emitted ids and the committed length, what was accepted still unmoved."""
    outcome = result.outcomes[0]
    emitted = [token.token_id for token in outcome.tokens]
    accepted: list[int] = []
    while len(emitted) < num_tokens:
        tree = outcome.tree() or DraftTree.root_only(emitted[-1])
        segment = Segment(1, committed, list(tree.tokens), list(tree.parents), 0, -1, accepted, True)
        outcome = driver.run(segment).outcomes[0]
        emitted += [token.token_id for token in outcome.tokens]
        accepted = outcome.accepted
        committed += len(accepted)
    return emitted, committed


@pytest.mark.parametrize("chunks", [[13], [1, 12], [4, 4, 5], [5, 7, 1]])
def test_the_drafter_sees_the_prompt_and_not_what_was_sampled(world: TinyWorld, chunks: list[int]) -> None:
    """CASES S14, P15: behind a middle chunk comes the next prompt token; rows and tree have the same bits as in one."""
    ids = prompt(13)
    one, many = (Driver(world.plain.path, world.eagle3, TreeShape(3, 2, 6)) for _ in range(2))
    assert many.prefill(ids, chunks).outcomes == one.prefill(ids, [13]).outcomes
    for pools in ("target", "draft"):
        rows = [driver.rows(getattr(driver.built.pools, pools), 13) for driver in (one, many)]
        assert torch.equal(*rows)
        assert not rows[0].isnan().any()


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(4, 4, 16)], ids=str)
@pytest.mark.parametrize("model", ["markov", "plain"])
def test_drafter_rows_are_rewritten_from_what_the_target_saw(world: TinyWorld, model: str, shape: TreeShape) -> None:
    """CASES S16, contract 5: after many rounds the drafter's KV is bit for bit that of a fresh prefill."""
    plain, head = (world.plain, world.eagle) if model == "plain" else (world.markov, world.agrees)
    driver, fresh = Driver(plain.path, head, shape), Driver(plain.path, head, shape)
    ids = prompt(6)
    emitted, committed = decode(driver, driver.prefill(ids, [6]), 6, 15)
    assert emitted[:15] == plain.answer(ids, 15)
    sequence = [*ids, *emitted]
    fresh.prefill(sequence[: committed + 1], [committed + 1])
    assert torch.equal(driver.rows(driver.draft_pool, committed), fresh.rows(fresh.draft_pool, committed))


def test_tokens_are_told_before_drafts_are_grown(world: TinyWorld) -> None:
    driver = Driver(world.plain.path, world.eagle, TreeShape(3, 1, 4))
    middle = Segment(1, 0, prompt(8)[:5], None, 5, prompt(8)[5], [], False)
    driver.run(middle, early_tokens=True)
    assert [type(said) for said in driver.said] == [StepResult], "a middle chunk has no token to tell"
    driver.run(Segment(1, 5, prompt(8)[5:], None, 2, -1, [], True), early_tokens=True)
    early, result = driver.said[1:]
    assert isinstance(early, StepTokens)
    assert isinstance(result, StepResult)
    assert early.outcomes[0].tokens == result.outcomes[0].tokens
    assert (early.outcomes[0].tree(), result.outcomes[0].tree() is None) == (None, False)
    assert driver.built.gate.wait(1, drafter=True, timeout_s=0)


@pytest.mark.parametrize(
    ("split", "captured"), [((4,), [(1, 2, 3)]), ((1, 3), [(1,), (2, 3)]), ((2, 1, 1), [(1, 2), (3,), ()])]
)
def test_every_feature_is_taken_by_the_stage_that_reaches_it(
    world: TinyWorld, split: tuple[int, ...], captured: list[tuple[int, ...]]
) -> None:
    config = EngineConfig(
        model=str(world.plain.path), role=Role.DECODE, draft_head=str(world.eagle3), layer_split=split
    )
    target = read_config(world.plain.path)
    assert [captured_layers(config, target, stage) for stage in range(len(split))] == captured
