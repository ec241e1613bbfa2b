"""Prompts that share prefixes: KV is reused, output is not touched."""

import pytest
from local_pair import Ask, End, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.pages import prefix_keys
from graftline.engine.service_api import FirstToken, Scheduled
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

PAGE = 4


@pytest.mark.parametrize("speculates", [True, False])
def test_the_same_prompt_again(world: TinyWorld, speculates: bool) -> None:
    """CASES A18, A10, S18: lengths around pages; hits up to the last page, one token always computed."""
    with local_pair(world.plain.path, world.eagle if speculates else None, decode_split=(2, 2)) as pair:
        for length in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 31, 32, 33):
            first, again, third = (pair.generate(prompt(length), 5) for _ in range(3))
            assert first.ids == again.ids == third.ids == world.plain.answer(prompt(length), 5)
            assert first.cached == [0]
            assert again.cached == third.cached == [(length - 1) // PAGE * PAGE]
            assert again.handoffs[0].num_bytes == first.handoffs[0].num_bytes, "cached pages are sent as well"


def test_eight_at_once(world: TinyWorld) -> None:
    """CASES S17: nothing is published before it was computed."""
    with local_pair(world.plain.path, world.eagle, prefill_split=(2, 2), decode_split=(2, 2), num_pages=200) as pair:
        for length in (64, 63, 65):
            answers = pair.run([Ask(token_ids=prompt(length), max_tokens=4)] * 8)
            assert [answer.ids for answer in answers] == [world.plain.answer(prompt(length), 4)] * 8


def test_prompts_that_part_ways(world: TinyWorld) -> None:
    """Common prefixes of every length, with and without drafter; the drafter's rows stay those of a fresh prefill."""
    base = prompt(32)
    asks = [
        Ask(token_ids=[*base[:shared], *prompt(40 - shared, seed)], max_tokens=6)
        for seed, shared in enumerate((0, 3, 4, 5, 8, 15, 16, 17, 31, 32), start=1)
    ]
    for shape in (TreeShape(3, 1, 4), NO_SPECULATION):
        head = world.eagle if shape.speculates else None
        results = []
        for cached in (True, False):
            with local_pair(
                world.plain.path, head, tree=shape, num_pages=200, prefill={"prefix_cache": cached}
            ) as pair:
                pair.generate(base, 1)
                results.append(pair.run(asks, concurrency=1))
        with_cache, without = results
        for ask, answer, fresh in zip(asks, with_cache, without, strict=True):
            assert answer.ids == fresh.ids == world.plain.answer(ask.token_ids, 6)
            assert answer.speculation == fresh.speculation, "the same drafts were made and held"
        assert sum(answer.cached[0] for answer in with_cache) > 80
        assert sum(answer.cached[0] for answer in without) == 0


def test_a_page_is_shared_only_where_its_drafter_row_is_the_same() -> None:
    """The drafter's last row of a page takes the token behind it: pages 0 to 3 agree, the token behind them differs."""
    first, second = [*range(16), 50, 51, 52, 53], [*range(16), 60, 51, 52, 53]
    keys, others = prefix_keys(first, PAGE, lookahead=1), prefix_keys(second, PAGE, lookahead=1)
    assert keys[:3] == others[:3]
    assert keys[3] != others[3]
    assert len(keys) == 4, "what comes behind the last page is not known yet"
    assert prefix_keys(first, PAGE)[:4] == prefix_keys(second, PAGE)[:4]
    assert len(prefix_keys(first, PAGE)) == 5
    assert len({*keys, *prefix_keys(first, PAGE)}) == 9, "keys of one kind are no keys of the other"


def test_eviction_goes_from_the_end_of_a_prefix(world: TinyWorld) -> None:
    """What is left of a prefix under pressure is its beginning, which can still be found."""
    with local_pair(world.plain.path, num_pages=64, prefill={"num_pages": 16}) as pair:
        pair.generate(prompt(40), 2)  # 10 pages stay cached, 6 are free
        pair.generate(prompt(36, 1), 2)  # takes 9: 3 of them from the first prompt's end
        again = pair.generate(prompt(40), 2)
        assert again.ids == world.plain.answer(prompt(40), 2)
        assert again.cached == [28]


def test_a_prompt_that_waits_leaves_the_order_of_eviction(world: TinyWorld) -> None:
    """Looking for its room, again and again, must not make the beginning of its prefix the first to go."""
    with local_pair(world.plain.path, num_pages=64, prefill={"num_pages": 16}) as pair:
        pair.generate(prompt(40), 2)  # 10 pages stay cached, 6 are free
        pair.network.hold()
        holder = pair.submit(Ask(token_ids=prompt(36, 1), max_tokens=2))  # takes 9: 7 of the prefix are left
        pair.pump(lambda: any(isinstance(event, FirstToken) for event in holder.answer.events))
        waiting = pair.submit(Ask(token_ids=[*prompt(40), *prompt(23, 2)], max_tokens=2))
        small = pair.submit(Ask(token_ids=prompt(4, 3), max_tokens=2))  # overtakes, and takes the last of the 7
        pair.pump(lambda: any(isinstance(event, Scheduled) for event in small.answer.events))
        waiting.cancel()
        pair.finish([waiting])
        pair.network.let_go()
        pair.finish([holder, small])
        assert pair.generate(prompt(40), 2).cached == [24]


def test_a_cancelled_prompt_is_not_in_the_cache(world: TinyWorld) -> None:
    """CASES B09: only a prompt that was computed to its end is published."""

    def hook(call: object, event: object) -> None:
        if not isinstance(event, FirstToken):
            call.cancel()  # type: ignore[attr-defined]  # a Call

    with local_pair(world.plain.path, world.eagle, chunk_tokens=4) as pair:
        gone = pair.run([Ask(token_ids=prompt(40), max_tokens=4, on_event=hook)])[0]
        assert gone.end is End.CANCELLED
        again = pair.generate(prompt(40), 4)
        assert again.ids == world.plain.answer(prompt(40), 4)
        assert again.cached in ([0], [36])


def test_a_prompt_may_need_the_whole_pool(world: TinyWorld) -> None:
    """Cached pages give way, those of the prompt's own prefix excepted."""
    with local_pair(world.plain.path, num_pages=64, prefill={"num_pages": 16}) as pair:
        for seed in (0, 1, 0, 0):
            answer = pair.generate(prompt(63, seed), 1)
            assert answer.ids == world.plain.answer(prompt(63, seed), 1)
        assert answer.cached == [60]
