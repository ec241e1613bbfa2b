"""Contract 9: whatever happens to a request in whatever phase, it ends once, and nothing of it is held any more.

`local_pair` asserts at its end that every pool of both engines is whole.
"""

import queue
from collections.abc import Callable
from random import Random

import pytest
from faulty_port import Fault
from local_pair import DECODE, PREFILL, Answer, Ask, Call, End, Event, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.plan import SendOrder, SentPool
from graftline.engine.request import FinishReason, Request, RequestId, RequestKey, Sampling, Stopping
from graftline.engine.service_api import (
    DecodeFailed,
    DecodeFinished,
    Drained,
    FirstToken,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Reserved,
    Scheduled,
    Tokens,
)
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError, OutOfCapacityError, PeerUnavailableError
from graftline.worker.facts import encode_peer, stage_layouts

CHAIN = TreeShape(3, 1, 4)


def cancel_at(kind: type, count: int = 1) -> Callable[[Call, Event], None]:
    """Cancels when the count-th event of a kind arrives."""
    seen = [0]

    def hook(call: Call, event: Event) -> None:
        seen[0] += isinstance(event, kind)
        if isinstance(event, kind) and seen[0] == count:
            call.cancel()

    return hook


@pytest.mark.parametrize(("kind", "count"), [(Scheduled, 1), (Reserved, 1), (FirstToken, 1), (Tokens, 1), (Tokens, 3)])
def test_cancel_at_every_event(world: TinyWorld, kind: type, count: int) -> None:
    """CASES B03, B09, P04: computing, awaiting the destination, sending, running, in flight; neighbours go on."""
    with local_pair(world.plain.path, world.eagle, prefill_split=(2, 2), decode_split=(2, 2), chunk_tokens=8) as pair:
        for length in (3, 30):
            cancelled = Ask(token_ids=prompt(length), max_tokens=30, on_event=cancel_at(kind, count))
            others = [Ask(token_ids=prompt(length, seed), max_tokens=12) for seed in (1, 2)]
            gone, *rest = pair.run([cancelled, *others])
            assert gone.end is End.CANCELLED
            assert gone.ids == world.plain.answer(prompt(length), 30)[: len(gone.ids)]
            assert [answer.ids for answer in rest] == [world.plain.answer(prompt(length, seed), 12) for seed in (1, 2)]
            pair.assert_quiescent()


def test_cancel_while_waiting(world: TinyWorld) -> None:
    """CASES B10: in the prefill's line, and in the decode's line, behind a request that holds the only slot."""
    with local_pair(world.plain.path, world.eagle, prefill={"max_running": 2}, decode={"max_running": 1}) as pair:
        pair.network.hold()
        first = pair.submit(Ask(token_ids=prompt(9), max_tokens=6))
        pair.pump(lambda: pair.decode.load().slots_free == 0)
        in_decode_line = pair.submit(Ask(token_ids=prompt(10), max_tokens=6))
        pair.pump(lambda: any(isinstance(event, FirstToken) for event in in_decode_line.answer.events))
        in_prefill_line = pair.submit(Ask(token_ids=prompt(11), max_tokens=6))
        in_prefill_line.cancel()
        in_decode_line.cancel()
        assert [answer.end for answer in pair.finish([in_prefill_line, in_decode_line])] == [End.CANCELLED] * 2
        assert in_prefill_line.answer.events[:-1] == []
        pair.network.let_go()
        assert pair.finish([first])[0].ids == world.plain.answer(prompt(9), 6)


def test_cancel_in_the_middle_of_a_write(world: TinyWorld) -> None:
    """CASES A06, B01, B06: pages stay out of others' reach until the write is over; three neighbours are unharmed."""
    with local_pair(world.plain.path, world.eagle, num_pages=12, prefill={"max_running": 4}) as pair:
        pair.network.hold()
        gone = pair.submit(Ask(token_ids=prompt(20), max_tokens=6))
        pair.pump(lambda: {Reserved, FirstToken} <= {type(event) for event in gone.answer.events})
        pair.network.await_held()
        gone.cancel()
        # Its 5 pages are not free while the write hangs, on neither side: 7 of 12 are left.
        assert pair.decode.load().pages.used == 5
        others = [pair.submit(Ask(token_ids=prompt(20, seed), max_tokens=6)) for seed in (1, 2, 3)]
        pair.pump(lambda: any(isinstance(event, Scheduled) for event in others[0].answer.events))
        assert not gone.ended
        pair.network.let_go()
        answers = pair.finish([gone, *others])
    assert answers[0].end is End.CANCELLED
    for seed, answer in zip((1, 2, 3), answers[1:], strict=True):
        assert answer.ids == world.plain.answer(prompt(20, seed), 6)


def test_cancel_after_the_end_or_twice_changes_nothing(world: TinyWorld) -> None:
    """CASES B19: exactly one terminal event wins."""
    with local_pair(world.plain.path, world.eagle, decode_split=(2, 2)) as pair:
        call = pair.submit(Ask(token_ids=prompt(5), max_tokens=5))
        pair.finish([call])
        for _ in range(3):
            pair.prefill.cancel(call.key)
            pair.decode.cancel(call.key)
            pair.decode.release(call.key)
            pair.decode.quarantine(call.key, PREFILL)
        doubled = pair.submit(Ask(token_ids=prompt(5), max_tokens=40))
        pair.pump(lambda: any(isinstance(event, Tokens) for event in doubled.answer.events))
        for _ in range(3):
            pair.decode.cancel(doubled.key)
        assert pair.finish([doubled])[0].end is End.CANCELLED
        assert pair.generate(prompt(6), 5).ids == world.plain.answer(prompt(6), 5)


@pytest.mark.parametrize(("seed", "num_requests"), [(0, 100), (1, 40), (2, 40)])
def test_a_storm_of_cancels(world: TinyWorld, seed: int, num_requests: int) -> None:
    """CASES P01, P03, P04, P11, B03: many requests over two stages each, most cancelled at random points."""
    draw = Random(seed)

    def hook(call: Call, event: Event) -> None:
        if draw.random() < 0.25:
            call.cancel()

    asks = [
        Ask(token_ids=prompt(draw.choice((1, 4, 7, 17, 38))), max_tokens=draw.randrange(1, 12), on_event=hook)
        for _ in range(num_requests)
    ]
    with local_pair(
        world.plain.path,
        world.eagle,
        prefill_split=(2, 2),
        decode_split=(2, 2),
        prefill={"max_running": 4},
        decode={"max_running": 6},
        num_pages=40,
        chunk_tokens=8,
    ) as pair:
        answers = pair.run(asks, concurrency=12)
        assert pair.generate(prompt(9), 8).ids == world.plain.answer(prompt(9), 8)
    assert {answer.end for answer in answers} == {End.CANCELLED, End.FINISHED}
    for ask, answer in zip(asks, answers, strict=True):
        expected = world.plain.answer(ask.token_ids, 12)[: ask.max_tokens]
        assert answer.ids == (expected if answer.end is End.FINISHED else expected[: len(answer.ids)])


def fail_once(fault: Fault, stage: int = 0, drafter: bool = False) -> Callable[[SendOrder, int], Fault | None]:
    """The first send of a stage fails, of its target's pages or of the drafter's."""
    faults = [fault]

    def rule(order: SendOrder, from_stage: int) -> Fault | None:
        return faults.pop() if faults and (from_stage, order.pool is SentPool.DRAFT) == (stage, drafter) else None

    return rule


@pytest.mark.parametrize(("stage", "drafter"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("drained", [True, False])
def test_a_failed_write_fails_its_request_alone(world: TinyWorld, stage: int, drafter: bool, drained: bool) -> None:
    """CASES B15, contract 7: one of many writes fails; pages that late bytes may reach stay in quarantine."""
    with local_pair(world.plain.path, world.eagle, prefill_split=(2, 2), chunk_tokens=8, quiescent=False) as pair:
        pair.network.rule = fail_once(Fault("connection reset", drained), stage, drafter)
        answer = pair.generate(prompt(30), 6)
        assert answer.end is End.FAILED
        assert "transfer-failed: stage" in str(answer.reason)
        assert "connection reset" in str(answer.reason)
        failed = [event for event in answer.events if isinstance(event, PrefillFailed)]
        assert [(event.code, event.drained) for event in failed] == [(PrefillFailure.TRANSFER_FAILED, drained)]
        assert answer.events[-1] is failed[0], "nothing after the terminal event"
        assert pair.generate(prompt(30), 6).ids == world.plain.answer(prompt(30), 6)
        pair.assert_quiescent()
        assert pair.decode.load().pages.quarantined == (0 if drained else 8)
        pair.decode.forget_peer("somebody else")
        pair.decode.forget_peer(PREFILL)
        pair.generate(prompt(3), 2)
        pair.assert_quiescent()
        assert pair.decode.load().pages.quarantined == 0


def test_quarantine_ends_by_time(world: TinyWorld) -> None:
    """Contract 7: a bounded time longer than the transport's own timeout frees what nobody answers for."""
    with local_pair(world.plain.path, decode={"quarantine_s": 0.3}) as pair:
        pair.network.rule = fail_once(Fault("gone", drained=False))
        assert pair.generate(prompt(9), 3).end is End.FAILED
        pair.assert_quiescent()
        assert pair.decode.load().pages.quarantined == 3
        pair.await_load(lambda: pair.decode.load().pages.quarantined == 0)
        assert pair.decode.load().pages.free == 64


def test_a_cancelled_request_whose_writes_failed_says_what_may_still_land(world: TinyWorld) -> None:
    with local_pair(world.plain.path, quiescent=False) as pair:
        pair.network.hold()
        call = pair.submit(Ask(token_ids=prompt(9), max_tokens=6))
        pair.network.rule = lambda order, stage: Fault("timeout", drained=False)
        pair.pump(lambda: any(isinstance(event, Reserved) for event in call.answer.events))
        call.cancel()
        pair.network.let_go()
        answer = pair.finish([call])[0]
        assert answer.end is End.CANCELLED
        undrained = isinstance(answer.events[-1], PrefillFailed) and not answer.events[-1].drained
        pair.assert_quiescent()
        assert pair.decode.load().pages.quarantined == (3 if undrained else 0)


def test_a_destination_that_does_not_fit_is_refused(world: TinyWorld) -> None:
    with local_pair(world.plain.path) as pair:
        call = pair.submit(Ask(token_ids=prompt(9), max_tokens=6, on_event=_shorten_destination))
        answer = pair.finish([call])[0]
        assert answer.end is End.FAILED
        assert "invalid-request: a destination of 2 pages for a prompt that needs 3" in str(answer.reason)


def _shorten_destination(call: Call, event: Event) -> None:
    if isinstance(event, Reserved):
        pages = event.destination.page_ids[:-1]
        call.pair.prefill.set_destination(call.key, type(event.destination)(pages, event.destination.slot_id))


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_few_tokens(world: TinyWorld, max_tokens: int) -> None:
    """CASES A01, A03: exactly max_tokens, and no decode round for one."""
    with local_pair(world.plain.path, world.eagle) as pair:
        answer = pair.generate(prompt(9), max_tokens)
        assert answer.ids == world.plain.answer(prompt(9), max_tokens)
        assert answer.reason is FinishReason.LENGTH
        rounds = pair.decode.totals.rounds
        assert (rounds == 0) is (max_tokens == 1)
        assert any(isinstance(event, Reserved) for event in answer.events) is (max_tokens > 1)


def test_exactly_max_tokens_for_all_small_numbers(world: TinyWorld) -> None:
    """CASES A03, P20, S32: 1 to 17 tokens, so that requests end at every place of a page and of a round."""
    for head in (None, world.agrees):
        with local_pair(world.markov.path, head, tree=CHAIN if head else None, decode_split=(2, 2)) as pair:
            answers = pair.run([Ask(token_ids=prompt(3), max_tokens=count) for count in range(1, 18)], concurrency=4)
        assert [answer.ids for answer in answers] == [world.markov.answer(prompt(3), count) for count in range(1, 18)]


def test_a_first_token_that_ends_the_request(world: TinyWorld) -> None:
    """CASES A01: the end of sequence as first token, while the handoff is on its way."""
    first = world.plain.answer(prompt(20), 1)[0]
    with local_pair(world.plain.path, world.eagle, chunk_tokens=8) as pair:
        for stops in ({"eos_ids": frozenset({first})}, {"stop_ids": frozenset({first, 3})}):
            answer = pair.generate(prompt(20), 9, **stops)
            assert (answer.ids, answer.reason) == ([first], FinishReason.STOP)
            assert not any(isinstance(event, DecodeFinished) for event in answer.events)


def test_preemption_every_few_rounds_changes_no_output(world: TinyWorld) -> None:
    """CASES R01, R03: what was emitted goes on seamlessly, greedy and seeded, with and without drafts."""
    for every, head in ((1, world.eagle), (2, None), (3, world.eagle)):
        with local_pair(
            world.plain.path, head, tree=CHAIN if head else None, decode_split=(2, 2), decode={"preempt_every": every}
        ) as pair:
            sampling = Sampling(temperature=0.9, seed=5)
            asks = [
                Ask(token_ids=prompt(7, seed), max_tokens=15, sampling=(Sampling(), sampling)[seed % 2])
                for seed in range(4)
            ]
            answers = pair.run(asks)
            assert pair.decode.totals.preemptions > 4
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.ids == world.plain.answer(ask.token_ids, 15, ask.sampling)
        assert max(answer.num_attempts for answer in answers) > 1


@pytest.mark.parametrize("kind", [Scheduled, Reserved, FirstToken, Tokens])
def test_cancel_of_preempted_requests(world: TinyWorld, kind: type) -> None:
    """Cancelled in a later attempt, in every phase; who is not goes on. A cancel may meet the next preemption, and an
    attempt whose first token is the last one needs no pages of a decode.
    """
    cancelled: list[Ask] = []

    def hook(call: Call, event: Event) -> None:
        if call.answer.num_attempts > 1 and isinstance(event, kind):
            cancelled.append(call.ask)
            call.cancel()

    with local_pair(world.plain.path, world.eagle, decode_split=(2, 2), decode={"preempt_every": 1}) as pair:
        asks = [Ask(token_ids=prompt(7, seed), max_tokens=15, on_event=(hook, None)[seed % 2]) for seed in range(6)]
        answers = pair.run(asks)
    assert [answer.end for answer in answers[1::2]] == [End.FINISHED] * 3
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, 15)[: len(answer.ids)]
        was_cancelled = any(ask is other for other in cancelled)
        assert was_cancelled or kind in (Reserved, Tokens) or ask.on_event is None or answer.num_attempts == 1
        if kind is Tokens:
            assert was_cancelled or answer.end is not End.CANCELLED
        else:
            assert (answer.end is End.CANCELLED) is was_cancelled
    assert kind is Tokens or any(answer.end is End.CANCELLED for answer in answers)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("speculates", [True, False])
def test_a_pool_for_two_serves_six(world: TinyWorld, page_size: int, speculates: bool) -> None:
    """CASES R01, R02, B17: nobody fails; whoever is preempted goes on later."""
    head = world.eagle if speculates else None
    with local_pair(
        world.plain.path,
        head,
        decode_split=(2, 2),
        page_size=page_size,
        num_pages=64 * 4 // page_size,
        decode={"num_pages": 48 // page_size},
    ) as pair:
        asks = [Ask(token_ids=prompt(17, seed), max_tokens=14) for seed in range(6)]
        answers = pair.run(asks)
        assert pair.decode.totals.preemptions > 0 or page_size == 16
        assert min(answer.num_attempts for answer in answers) == 1, "the oldest never gives way"
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, 14)


def test_who_was_preempted_is_let_in_with_room_to_grow(world: TinyWorld) -> None:
    """CASES R52: long outputs and a pool for a few: nobody is let in just to give way and be prefilled again."""
    with local_pair(
        world.markov.path,
        world.agrees,
        tree=CHAIN,
        num_pages=128,
        prefill={"max_running": 32},
        decode={"num_pages": 48},
    ) as pair:
        asks = [Ask(token_ids=prompt(4 + seed % 9, seed), max_tokens=120) for seed in range(16)]
        answers = pair.run(asks)
        assert 0 < pair.decode.totals.preemptions < 3 * len(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.markov.answer(ask.token_ids, 120)
        assert answer.num_attempts <= 8


def test_pools_that_fit_exactly(world: TinyWorld) -> None:
    """CASES S30, S40: prompt + max_tokens fill the pool to the last position, no draft looks further; neighbours."""
    with local_pair(world.markov.path, world.agrees, tree=CHAIN, decode={"num_pages": 6}) as pair:
        assert pair.generate(prompt(10), 14).ids == world.markov.answer(prompt(10), 14)
        assert pair.generate(prompt(10), 200).ids == world.markov.answer(prompt(10), 14), "the pool is the context"
        both = pair.run([Ask(token_ids=prompt(5, seed), max_tokens=7) for seed in (1, 2)])
        assert [answer.ids for answer in both] == [world.markov.answer(prompt(5, seed), 7) for seed in (1, 2)]
        assert pair.decode.totals.preemptions == 0


def test_a_lone_request_that_outgrows_the_pool_keeps_its_output(world: TinyWorld) -> None:
    """CASES S31: it ends with what it has; the engine lives."""
    with local_pair(world.plain.path, world.eagle, decode={"num_pages": 16}) as pair:
        answer = pair.generate(prompt(30), 200)
        assert (answer.ids, answer.reason) == (world.plain.answer(prompt(30), 34), FinishReason.LENGTH)
        assert pair.generate(prompt(30, 1), 5).ids == world.plain.answer(prompt(30, 1), 5)


def test_quarantined_pages_delay_but_do_not_fail(world: TinyWorld) -> None:
    """A lone request that needs what is in quarantine is preempted until time frees it."""
    with local_pair(world.plain.path, world.eagle, decode={"num_pages": 10, "quarantine_s": 0.5}) as pair:
        pair.network.rule = fail_once(Fault("gone", drained=False))
        assert pair.generate(prompt(18), 3).end is End.FAILED
        answer = pair.generate(prompt(12), 20)
        assert answer.ids == world.plain.answer(prompt(12), 20)


def test_what_only_the_end_of_a_quarantine_has_room_for_is_refused(world: TinyWorld) -> None:
    """It would wait in silence for as long as the quarantine lasts, while another decode may have room; what still fits
    beside the quarantine is served.
    """
    decode = {"num_pages": 10, "quarantine_s": 3600.0, "quarantine_wait_s": 0.1, "heartbeat_s": 0.02}
    with local_pair(world.plain.path, decode=decode) as pair:
        pair.network.rule = fail_once(Fault("gone", drained=False))
        assert pair.generate(prompt(18), 3).end is End.FAILED
        small, large = prompt(12), prompt(22)
        for _ in range(2):
            refused = pair.generate(large, 3)
            assert refused.end is End.FAILED
            assert "5 of 10 pages are in quarantine" in str(refused.reason)
            assert pair.generate(small, 5).ids == world.plain.answer(small, 5)
        pair.decode.forget_peer(PREFILL)
        assert pair.generate(large, 3).ids == world.plain.answer(large, 3)


def test_a_request_that_waits_for_others_is_not_refused(world: TinyWorld) -> None:
    """Who ends makes room for it, however long that takes."""
    decode = {"max_running": 1, "quarantine_wait_s": 0.1, "heartbeat_s": 0.02}
    with local_pair(world.plain.path, decode=decode) as pair:
        pair.network.hold()
        first = pair.submit(Ask(token_ids=prompt(9), max_tokens=3))
        pair.pump(lambda: pair.decode.load().slots_free == 0)
        second = pair.submit(Ask(token_ids=prompt(10), max_tokens=3))
        pair.pump(lambda: any(isinstance(event, FirstToken) for event in second.answer.events))
        with pytest.raises(queue.Empty):
            pair.pump_one(1.0)
        pair.network.let_go()
        for call, length in ((first, 9), (second, 10)):
            assert pair.finish([call])[0].ids == world.plain.answer(prompt(length), 3)


def test_slots_and_pages_are_reused_by_many(world: TinyWorld) -> None:
    """CASES P08, S25, S32: 32 requests over two slots; nothing of one shows in the next."""
    with local_pair(
        world.plain.path,
        world.eagle,
        prefill_split=(2, 2),
        decode_split=(2, 2),
        prefill={"max_running": 2},
        decode={"max_running": 2},
        num_pages=24,
    ) as pair:
        asks = [
            Ask(token_ids=prompt(5 + seed % 7, seed), max_tokens=1 + seed % 5, sampling=Sampling(seed % 2, seed=seed))
            for seed in range(32)
        ]
        answers = pair.run(asks, concurrency=10)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens, ask.sampling)


def test_chunked_prompts_get_through_a_single_slot(world: TinyWorld) -> None:
    """CASES P05: a prompt of several chunks with one slot, and with one less than stages."""
    for slots in (1, 2):
        with local_pair(
            world.plain.path,
            world.eagle,
            prefill_split=(1, 1, 2),
            decode_split=(1, 1, 2),
            prefill={"max_running": slots},
            decode={"max_running": slots},
        ) as pair:
            answers = pair.run([Ask(token_ids=prompt(40, seed), max_tokens=4) for seed in range(3)])
        assert [answer.ids for answer in answers] == [world.plain.answer(prompt(40, seed), 4) for seed in range(3)]


# --- input ----------------------------------------------------------------------------------------------------


def request(**changes: object) -> Request:
    fields: dict[str, object] = {
        "key": RequestKey(RequestId("direct"), 0),
        "token_ids": (1, 2, 3),
        "num_prompt_tokens": 3,
        "sampling": Sampling(),
        "stopping": Stopping(5),
    }
    return Request(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_ids", {"token_ids": (), "num_prompt_tokens": 0}),
        ("token_ids", {"token_ids": (1, -1, 3)}),
        ("token_ids", {"token_ids": (1, 259, 3)}),
        ("token_ids", {"token_ids": tuple(range(250)) * 2}),
        ("max_tokens", {"stopping": Stopping(0)}),
        ("max_tokens", {"stopping": Stopping(2), "num_prompt_tokens": 1}),
        ("stop_token_ids", {"stopping": Stopping(5, 2, frozenset({359}))}),
        ("stop_token_ids", {"stopping": Stopping(5, 2, frozenset({-1}))}),
        ("logit_bias", {"sampling": Sampling(logit_bias={259: -100.0})}),
        ("logit_bias", {"sampling": Sampling(logit_bias={5: float("nan")})}),
        ("temperature", {"sampling": Sampling(temperature=float("nan"))}),
        ("temperature", {"sampling": Sampling(temperature=-1.0)}),
        ("top_p", {"sampling": Sampling(top_p=0.0)}),
        ("min_p", {"sampling": Sampling(min_p=float("inf"))}),
        ("top_k", {"sampling": Sampling(top_k=-2)}),
        ("seed", {"sampling": Sampling(seed=1 << 64)}),
    ],
)
def test_bad_requests_are_refused_by_both_engines(world: TinyWorld, field: str, changes: dict[str, object]) -> None:
    """CASES A05, I01, I03, I04, I05, I06, I07: naming the field, before anything is queued; the next one is served."""
    with local_pair(world.plain.path) as pair:
        bad = request(**changes)
        with pytest.raises(InvalidRequestError) as refusal:
            pair.prefill.submit(bad, DECODE, True, print)
        assert refusal.value.field == field
        with pytest.raises(InvalidRequestError) as refusal:
            pair.decode.reserve(bad, print)
        assert refusal.value.field == field
        assert pair.generate(prompt(4), 2).ids == world.plain.answer(prompt(4), 2)


def test_a_request_under_a_name_in_use_fails_alone(world: TinyWorld) -> None:
    """Contract 11: the same id twice ends the second one, not the engine."""
    with local_pair(world.plain.path) as pair:
        pair.network.hold()
        call = pair.submit(Ask(token_ids=prompt(9), max_tokens=6))
        pair.pump(lambda: any(isinstance(event, Reserved) for event in call.answer.events))
        events: list[object] = []
        twin = request(key=call.key)
        pair.prefill.submit(twin, DECODE, True, events.append)
        pair.decode.reserve(twin, events.append)
        pair.network.let_go()
        assert pair.finish([call])[0].ids == world.plain.answer(prompt(9), 6)
        assert {type(event) for event in events} == {PrefillFailed, DecodeFailed}


def test_a_decode_that_is_not_paired_is_refused(world: TinyWorld) -> None:
    with local_pair(world.plain.path) as pair:
        with pytest.raises(PeerUnavailableError, match="decode-2 is not paired"):
            pair.prefill.submit(request(), "decode-2", True, print)
        pair.prefill.forget(DECODE)
        with pytest.raises(PeerUnavailableError, match="decode-1 is not paired"):
            pair.prefill.submit(request(), DECODE, True, print)
        pair.introduce()
        assert pair.generate(prompt(4), 2).ids == world.plain.answer(prompt(4), 2)


def test_a_full_line_refuses(world: TinyWorld) -> None:
    """Contract 10: beyond `max_queued` waiting requests new ones are turned away, and the others are served."""
    with local_pair(world.plain.path, prefill={"max_running": 1, "max_queued": 3}) as pair:
        pair.network.hold()
        calls = [pair.submit(Ask(token_ids=prompt(9), max_tokens=3))]
        pair.pump(lambda: any(isinstance(event, FirstToken) for event in calls[0].answer.events))
        calls += [pair.submit(Ask(token_ids=prompt(9), max_tokens=3)) for _ in range(3)]
        refused = 0
        for _ in range(20):
            try:
                calls.append(pair.submit(Ask(token_ids=prompt(9), max_tokens=3)))
            except OutOfCapacityError:
                refused += 1
        pair.network.let_go()
        answers = pair.finish(calls)
    full = [answer for answer in answers if "out-of-capacity" in str(answer.reason)]
    served = [answer for answer in answers if answer.end is End.FINISHED]
    assert len(served) == 4
    assert refused + len(full) == 20
    assert all(answer.ids == world.plain.answer(prompt(9), 3) for answer in served)


def _is_whole(answer: Answer) -> bool:
    return answer.end is End.FINISHED and any(isinstance(event, PrefillFinished) for event in answer.events)


def test_waves_down_to_empty_and_back(world: TinyWorld) -> None:
    """CASES S26, P14: the batch drains and refills; alternating with and without long prompts."""
    with local_pair(world.plain.path, world.eagle3, tree=TreeShape(4, 2, 8), decode_split=(1, 3)) as pair:
        for wave in range(6):
            answers = pair.run([Ask(token_ids=prompt(1 + 9 * seed, wave), max_tokens=3) for seed in range(4)])
            assert all(map(_is_whole, answers))
            pair.assert_quiescent()


def test_short_prompts_do_not_wait_for_a_long_one(world: TinyWorld) -> None:
    """A prompt of 25 chunks, then three of half a chunk: these have their first tokens long before it."""
    order: list[int] = []

    def hook(call: Call, event: Event) -> None:
        if isinstance(event, FirstToken):
            order.append(len(call.ask.token_ids))

    asks = [Ask(token_ids=prompt(length), max_tokens=3, on_event=hook) for length in (200, 4, 5, 6)]
    with local_pair(world.plain.path, world.eagle, chunk_tokens=8, prefill_split=(2, 2)) as pair:
        answers = pair.run(asks)
    assert sorted(order[:3]) == [4, 5, 6]
    assert [answer.ids for answer in answers] == [world.plain.answer(ask.token_ids, 3) for ask in asks]
    assert answers[0].handoffs[0].chunks <= 30


def test_who_fits_overtakes_who_does_not(world: TinyWorld) -> None:
    """A prompt that needs more pages than are free lets shorter ones pass, on both sides, and gets its turn."""
    ended: list[int] = []

    def hook(call: Call, event: Event) -> None:
        if isinstance(event, DecodeFinished):
            ended.append(len(call.ask.token_ids))

    with local_pair(world.plain.path, world.eagle, num_pages=16) as pair:
        pair.network.hold()
        holder = pair.submit(Ask(token_ids=prompt(24), max_tokens=4, on_event=hook))  # 6 of 16 pages
        pair.pump(lambda: pair.decode.load().pages.used == 6)
        rest = [pair.submit(Ask(token_ids=prompt(length), max_tokens=4, on_event=hook)) for length in (50, 7, 8)]
        pair.pump(lambda: pair.decode.load().slots_free == 16 - 3)
        assert [pair.decode.load().queued, pair.prefill.load().queued] == [0, 1]
        pair.network.let_go()
        answers = pair.finish([holder, *rest])
    assert ended[-1] == 50
    for call, answer in zip([holder, *rest], answers, strict=True):
        assert answer.ids == world.plain.answer(call.ask.token_ids, 4)


@pytest.mark.parametrize(
    ("slots", "num_pages", "length", "most"), [(2, 128, 9, 1), (8, 128, 9, 6), (16, 16, 9, 4), (16, 16, 33, 1)]
)
def test_a_decode_without_room_leaves_room_to_another(
    world: TinyWorld, slots: int, num_pages: int, length: int, most: int
) -> None:
    """CASES R51: its requests have nowhere to go and wait on the prefill with their slots and pages; those of a decode
    that idles pass them.
    """
    stranded: list[RequestKey] = []
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with local_pair(world.plain.path, world.eagle, num_pages=num_pages, prefill={"max_running": slots}) as pair:
        pair.prefill.pair("full", encode_peer(stage_layouts(pair.decode_engine.layouts)))
        for number in range(3 * slots):
            key = RequestKey(RequestId(f"stranded-{number}"), 0)
            ids = tuple(prompt(length, number))
            request = Request(key, ids, len(ids), Sampling(), Stopping(4, 0, frozenset(), frozenset()), None)
            pair.prefill.submit(request, "full", True, events.put)
            stranded.append(key)
        pair.await_load(lambda: pair.prefill.load().running == most and pair.prefill.load().queued == 3 * slots - most)
        answers = pair.run([Ask(token_ids=prompt(7, seed), max_tokens=6) for seed in range(5)])
        for seed, answer in enumerate(answers):
            assert answer.ids == world.plain.answer(prompt(7, seed), 6)
        assert pair.prefill.load().running == most
        for key in stranded:
            pair.prefill.cancel(key)
        ended = 0
        while ended < len(stranded):
            ended += isinstance(events.get(timeout=20.0), Drained)
        pair.prefill.forget("full")


def test_an_overload_leaves_no_trace(world: TinyWorld) -> None:
    """CASES R05: after preemptions the same requests take as many rounds, alone and together, as before them."""

    def rounds_of(asks: list[Ask], concurrency: int) -> tuple[int, int]:
        before = pair.decode.totals.rounds
        answers = pair.run(asks, concurrency=concurrency)
        assert [answer.ids for answer in answers] == [world.plain.answer(ask.token_ids, 12) for ask in asks]
        assert all(answer.num_attempts == 1 for answer in answers)
        return pair.decode.totals.rounds - before, sum(answer.total.rounds for answer in answers)

    with local_pair(world.plain.path, world.eagle, num_pages=20, decode_split=(2, 2)) as pair:
        light = [Ask(token_ids=prompt(9, seed), max_tokens=12) for seed in range(4)]
        alone, together = rounds_of(light, 1), rounds_of(light, 2)
        pair.run([Ask(token_ids=prompt(11, seed), max_tokens=40) for seed in range(12)])
        assert pair.decode.totals.preemptions > 0
        pair.assert_quiescent()
        assert rounds_of(light, 1) == alone
        rounds, requests_rounds = rounds_of(light, 2)
        assert requests_rounds == together[1]
        assert rounds * 0.8 <= together[0]
        assert pair.decode.load().pages.free == 20
