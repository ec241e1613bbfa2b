"""Prompts whose drafts are launched before their first token is read end as others do: same tokens, same trees."""

from pathlib import Path
from typing import Any

import pytest
from local_pair import Answer, Ask, End, local_pair
from tiny_world import TinyWorld, prompt
from torch import Tensor

from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.drafter import Drafter
from graftline.engine.plan import StepResult, StepTokens
from graftline.engine.prompt_end import PromptEnd, _Landing
from graftline.engine.request import DraftTree, Sampling, TreeOrigin
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20)
LENGTHS = (1, 15, 16, 17, 50, 7)


def answers_of(
    world: TinyWorld, shape: TreeShape, early: bool, split: tuple[int, ...] = (4,), **prefill: object
) -> tuple[list[Answer], dict[int, DraftTree]]:
    """Answers, and the trees that were handed over, by length of prompt."""
    trees: dict[int, DraftTree] = {}

    def asked(length: int, index: int) -> Ask:
        def keep(tree: DraftTree) -> DraftTree:
            trees[length] = tree
            return tree

        sampling = SEEDED if index % 2 else Sampling()
        return Ask(token_ids=prompt(length), max_tokens=6 + index, sampling=sampling, edit_tree=keep)

    head = world.eagle3 if shape.branching > 1 else world.eagle
    with local_pair(
        world.plain.path,
        head if shape.speculates else None,
        tree=shape,
        prefill_split=split,
        num_pages=128,
        prefill={"launch_drafts_early": early, "prefix_cache": False, **prefill},
    ) as pair:
        return pair.run([asked(length, index) for index, length in enumerate(LENGTHS)]), trees


@pytest.mark.parametrize("split", [(4,), (1, 3)], ids=len)
@pytest.mark.parametrize(
    "shape", [TreeShape(3, 1, 4), TreeShape(4, 2, 8), TreeShape(2, 2, 7, 5), NO_SPECULATION], ids=str
)
def test_tokens_and_trees_are_the_same(world: TinyWorld, shape: TreeShape, split: tuple[int, ...]) -> None:
    late, expected_trees = answers_of(world, shape, False, split)
    early, trees = answers_of(world, shape, True, split)
    for index, (ours, theirs) in enumerate(zip(early, late, strict=True)):
        sampling = SEEDED if index % 2 else Sampling()
        assert ours.ids == theirs.ids == world.plain.answer(prompt(LENGTHS[index]), 6 + index, sampling)
        assert ours.origins == theirs.origins
        assert ours.speculation == theirs.speculation
    assert trees == expected_trees
    assert len(trees) == len(LENGTHS)


@pytest.mark.parametrize(
    ("has_arrived", "expected"),
    [(True, ["StepTokens", "grow", "StepResult"]), (False, ["grow", "StepTokens", "StepResult"])],
)
def test_a_token_that_is_there_does_not_wait_until_its_tree_is_launched(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch, has_arrived: bool, expected: list[str]
) -> None:
    happened: list[str] = []
    finish, grow = PromptEnd.finish, Drafter.grow_unseen

    def spied_finish(self: PromptEnd, *arguments: Any) -> None:
        *others, emit, step = arguments

        def told(message: StepTokens | StepResult) -> None:
            happened.append(type(message).__name__)
            emit(message)

        finish(self, *others, told, step)

    def spied_grow(self: Drafter, *arguments: Any) -> Tensor:
        happened.append("grow")
        return grow(self, *arguments)

    monkeypatch.setattr(PromptEnd, "finish", spied_finish)
    monkeypatch.setattr(Drafter, "grow_unseen", spied_grow)
    monkeypatch.setattr(_Landing, "has_arrived", property(lambda landing: has_arrived))
    with local_pair(world.plain.path, world.eagle, prefill={"launch_drafts_early": True}) as pair:
        happened.clear()  # of warm-ups, on a GPU
        answer = pair.generate(prompt(7), 5)
    assert happened[: len(expected)] == expected  # on a GPU, trees of the decode's rounds follow
    assert answer.ids == world.plain.answer(prompt(7), 5)


def test_more_trees_than_there_is_scratch_for(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of one step grow in turns when they do not fit the scratch pages together."""
    usual, expected = answers_of(world, TreeShape(4, 2, 8), True)
    made = Drafter.__init__

    def crowded(self: Drafter, *arguments: object) -> None:
        made(self, *arguments)  # type: ignore[arg-type]
        self._max_trees = 1

    monkeypatch.setattr(Drafter, "__init__", crowded)
    answers, trees = answers_of(world, TreeShape(4, 2, 8), True, chunk_tokens=64)
    assert trees == expected
    assert [answer.ids for answer in answers] == [answer.ids for answer in usual]


def test_requests_that_need_a_look_at_the_logits_end_the_usual_way(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    takes = PromptEnd.takes

    def spy(self: PromptEnd, plan: object) -> bool:
        taken.append(takes(self, plan))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(PromptEnd, "takes", spy)
    eos = frozenset(range(200))
    with local_pair(world.plain.path, world.eagle, prefill={"launch_drafts_early": True}) as pair:
        taken.clear()  # of warm-ups, on a GPU
        plain = pair.run([Ask(token_ids=prompt(5), max_tokens=4)])[0]
        assert taken == [True]
        told = pair.run([Ask(token_ids=prompt(6), max_tokens=4, logprobs=2)])[0]
        bound = pair.run([Ask(token_ids=prompt(7), max_tokens=4, min_tokens=2, eos_ids=eos)])[0]
    assert taken == [True, False, False]
    assert plain.ids == world.plain.answer(prompt(5), 4)
    assert told.ids == world.plain.answer(prompt(6), 4)
    assert all(token.logprob is not None for token in told.tokens)
    assert bound.end is End.FINISHED
    assert len(bound.ids) >= 2


def test_roots_at_the_end_of_the_head_are_handed_over_alone(world: TinyWorld, tmp_path: Path) -> None:
    head = write_tiny_head(tmp_path / "head", world.short.path)
    with local_pair(world.short.path, head, num_pages=32, prefill={"launch_drafts_early": True}) as pair:
        answer = pair.generate(prompt(61), 3)
    assert answer.ids == world.short.answer(prompt(61), 3)
    assert answer.origins == [TreeOrigin.ROOT_ONLY]
