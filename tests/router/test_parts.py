"""Single parts of the router: breaker, policies, claims, admission, outbox, figures, parameters, imports."""

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from router_fakes import model_card

from graftline.errors import InvalidRequestError, OutOfCapacityError, PeerUnavailableError
from graftline.metrics import ROUTER_METRICS, Kind, Metrics, ProcessRole
from graftline.proto.channel import open_channel
from graftline.proto.status import Leg
from graftline.proto.v1.common_pb2 import ModelCard, SpeculationStats, TreeOrigin, WorkerIdentity
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.proto.v1.worker_pb2 import Limits, WatchResponse
from graftline.router.admission import Admission, RateLimit
from graftline.router.breaker import Breaker
from graftline.router.config import PolicyName
from graftline.router.figures import SpeculationFigures
from graftline.router.model import ModelStore, ServedModel
from graftline.router.outbox import Outbox, SlowConsumerError
from graftline.router.pairing import Claim, Pair, Pairing
from graftline.router.parameters import choice_seed
from graftline.router.policy import Demand, PrefixAffinity, make_policies
from graftline.router.transcript import Delta
from graftline.router.worker import Description, Role, Worker

MODEL = ServedModel.load(model_card())
DEMAND = Demand(range(200), 220)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def worker(address: str, role: Role, **load: Any) -> Worker:
    made = Worker(address, role, open_channel("127.0.0.1:1"), Breaker(5, 1, 10, Clock()))
    identity = WorkerIdentity(role=role.value, incarnation="one", address=address)
    limits = Limits(max_request_tokens=1000, max_running=8)
    made.described(Description(identity, {"page_size": "16"}, MODEL, limits, 1))
    made.reported(WatchResponse(incarnation="one", **load))
    made.available_again()
    return made


# --- breaker --------------------------------------------------------------------------------------------------


def test_one_cause_is_one_failure_however_many_requests_it_ends() -> None:
    """A stream that ends takes all of its requests with it: no reason to shut a decode out."""
    breaker = Breaker(3, 1.0, 3.0, Clock())
    for _ in range(20):
        for _ in range(2):
            cause = PeerUnavailableError("the stream of calls ended")
            for _ in range(5):
                breaker.failed(cause)
        assert not breaker.is_open
        breaker.succeeded()
    for _ in range(3):
        breaker.failed(PeerUnavailableError("the stream of calls ended"))
    assert breaker.is_open


def test_a_breaker_opens_after_failures_in_a_row_and_doubles_its_pause() -> None:
    clock = Clock()
    breaker = Breaker(3, 1.0, 3.0, clock)
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        outcome()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        assert breaker.retry_in_s == pytest.approx(pause_s)
        clock.now_s += pause_s
        assert not breaker.is_open, "half open"
        breaker.start()
        assert breaker.is_open, "one probe at a time"
        breaker.failed()
        breaker.undecided()
    clock.now_s += 3
    breaker.start()
    breaker.undecided()
    assert not breaker.is_open, "a probe that says nothing lets the next one pass"
    breaker.start()
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.retry_in_s == 0


def test_late_failures_do_not_prolong_an_open_breaker() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, 10.0, clock)
    breaker.failed()
    clock.now_s += 0.5
    breaker.failed()
    assert breaker.retry_in_s == pytest.approx(0.5)


# --- policies -------------------------------------------------------------------------------------------------


async def test_least_loaded_weighs_queued_tokens_of_prefills() -> None:
    one, two = worker("a:1", Role.PREFILL, queued_tokens=500), worker("b:1", Role.PREFILL, queued_tokens=100)
    policy = make_policies(PolicyName.LEAST_LOADED)[Role.PREFILL]
    assert policy.pick([one, two], DEMAND) is two
    two.pending_tokens = 900
    assert policy.pick([one, two], DEMAND) is one, "what was sent since the last report counts"


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"running": 5}, {"running": 1}),
        ({"pages_total": 100, "pages_free": 20}, {"pages_total": 100, "pages_free": 90}),
        ({"running": 2, "tokens_per_s": 20}, {"running": 2, "tokens_per_s": 100}),
        ({"queued": 4}, {"running": 1}),
    ],
)
async def test_least_loaded_weighs_slots_pages_and_speed_of_decodes(
    worse: dict[str, Any], better: dict[str, Any]
) -> None:
    one, two = worker("a:1", Role.DECODE, **worse), worker("b:1", Role.DECODE, **better)
    policy = make_policies(PolicyName.LEAST_LOADED)[Role.DECODE]
    assert {policy.pick(order, DEMAND) for order in ([one, two], [two, one])} == {two}


async def test_equal_workers_share_evenly_under_every_policy() -> None:
    for name in PolicyName:
        workers = [worker(f"{n}:1", Role.DECODE) for n in range(3)]
        policy = make_policies(name)[Role.DECODE]
        for _ in range(60):
            policy.pick(workers, DEMAND).open_requests += 1
        shares = sorted(w.open_requests for w in workers)
        assert shares[0] >= 15, (name, shares)
        assert policy.pick(workers[:1], DEMAND) is workers[0]


async def test_power_of_two_never_picks_the_most_loaded_of_three() -> None:
    workers = [worker(f"{n}:1", Role.DECODE, running=n) for n in range(3)]
    policy = make_policies(PolicyName.POWER_OF_TWO)[Role.DECODE]
    picked = Counter(policy.pick(workers, DEMAND).address for _ in range(200))
    assert picked["2:1"] == 0
    assert picked["0:1"] > picked["1:1"] > 0


async def test_prefix_affinity_returns_to_the_worker_that_saw_the_prefix_unless_it_is_busy() -> None:
    one, two = worker("a:1", Role.PREFILL), worker("b:1", Role.PREFILL)
    policy = PrefixAffinity(block_tokens=16, max_blocks=100)
    prefix = list(range(160))
    first = policy.pick([one, two], Demand([*prefix, 7], 0))
    other = two if first is one else one
    first.open_requests = 3
    for tail in range(10):
        assert policy.pick([one, two], Demand([*prefix, tail, *range(40)], 0)) is first
    first.pending_tokens = 1000
    assert policy.pick([one, two], Demand([*prefix, 9], 0)) is other
    first.pending_tokens = 0
    policy.forget(first)
    assert policy.pick([one, two], Demand(prefix, 0)) is other
    for start in range(0, 10_000, 16):
        policy.pick([one], Demand(list(range(start, start + 16)), 0))
    assert len(policy._sent["a:1"]) == 100


# --- pairing and claims ---------------------------------------------------------------------------------------


async def test_pairs_are_compatible_available_large_enough_and_not_excluded() -> None:
    pairing = Pairing(make_policies(PolicyName.LEAST_LOADED))
    p1, p2, d1, d2 = (
        worker("p1:1", Role.PREFILL),
        worker("p2:1", Role.PREFILL, queued_tokens=99),
        worker("d1:1", Role.DECODE),
        worker("d2:1", Role.DECODE, running=5),
    )
    everyone = [p1, p2, d1, d2]

    def pick(*excluded: Worker, demand: Demand = DEMAND) -> tuple[str, str] | None:
        keys = {(w.address, w.incarnation) for w in excluded}
        pair = pairing.pick(everyone, MODEL, demand, keys)
        return None if pair is None else (pair.prefill.address, pair.decode.address)

    assert pick() == ("p1:1", "d1:1")
    assert pick(d1) == ("p1:1", "d2:1")
    assert pick(p1, d1) == ("p2:1", "d2:1")
    assert pick(p1, p2) is None
    assert pick(demand=Demand(range(10), 1001)) is None
    assert pick(demand=Demand(range(1000), 1000)) is None
    p1.refuses_new("draining")
    assert pick() == ("p2:1", "d1:1")
    assert p2.description is not None
    p2.description = Description(p2.description.identity, {"page_size": "32"}, MODEL, Limits(), 1)
    assert pick() is None
    other = ServedModel.load(model_card(model_id="other"))
    assert pairing.pick(everyone, other, DEMAND, set()) is None


async def test_a_claim_counts_exactly_once_whatever_ends_it() -> None:
    """CASES G02."""
    pair = Pair(worker("p:1", Role.PREFILL), worker("d:1", Role.DECODE))

    def counts() -> tuple[int, int, int]:
        return pair.prefill.open_requests, pair.prefill.pending_tokens, pair.decode.open_requests

    with contextlib.suppress(RuntimeError), Claim(pair, 7) as claim:
        assert counts() == (1, 7, 1)
        claim.prompt_computed()
        claim.prompt_computed()
        assert counts() == (1, 0, 1)
        claim.handed_over()
        claim.handed_over()
        assert counts() == (0, 0, 1)
        raise RuntimeError
    assert counts() == (0, 0, 0)
    with Claim(pair, 7):
        pass
    assert counts() == (0, 0, 0)


async def test_requests_from_before_a_breaker_opened_let_nobody_past_its_probe() -> None:
    """CASES F55: only the probe's own end says that another one may pass."""
    clock = Clock()
    pair = Pair(worker("p:1", Role.PREFILL), worker("d:1", Role.DECODE))
    breaker = pair.decode.breaker = Breaker(1, 1.0, 10.0, clock)
    with contextlib.ExitStack() as before:
        before.enter_context(Claim(pair, 1))
        breaker.failed()
        clock.now_s += 1
        with Claim(pair, 1):
            before.close()
            assert breaker.is_open
        assert not breaker.is_open


async def test_losing_a_worker_revokes_its_claims_once_and_only_while_it_matters() -> None:
    pair = Pair(worker("p:1", Role.PREFILL), worker("d:1", Role.DECODE))
    stopped: list[str] = []
    with Claim(pair, 1) as claim:
        claim.attach(lambda: stopped.append("first"))
        claim.handed_over()
        pair.prefill.lost("dead")
        assert claim.revoked is None
        pair.decode.lost("hung")
        pair.decode.lost("still hung")
        assert claim.revoked == (Leg.DECODE, "decode d:1: hung")
        assert stopped == ["first"]
    with Claim(pair, 1) as late:
        late.revoke(pair.prefill, "gone")
        late.attach(lambda: stopped.append("late"))
    assert stopped == ["first", "late"]


def test_workers_fit_when_their_fingerprints_are_equal() -> None:
    """In whatever order they were written, and whatever is in them."""

    def fit(fields: dict[str, str]) -> str:
        return Description(WorkerIdentity(), fields, MODEL, Limits(), 1).fit

    assert fit({"a": "1", "b": "2"}) == fit({"b": "2", "a": "1"})
    others = [{}, {"a": "1"}, {"a": "2", "b": "1"}, {"a": "1', 'b': '2"}, {"a": "1", "b": ""}, {"a, b": "1, 2"}]
    assert len({fit(fields) for fields in [{"a": "1", "b": "2"}, *others]}) == 7


# --- admission, outbox, figures -------------------------------------------------------------------------------


async def test_admission_is_bounded_and_labels_are_unique() -> None:
    admission = Admission(2, 0.5)
    assert await admission.wait_until_idle(0)
    with admission.places() as places:
        places.take("a")
        places.take("")
        with pytest.raises(OutOfCapacityError) as full:
            places.take("c")
        assert full.value.retry_after_s == 0.5
        assert not await admission.wait_until_idle(0.01)
    assert admission.num_open == 0
    with admission.places() as places:
        places.take("a")
        with admission.places() as others, pytest.raises(InvalidRequestError, match="'a'"):
            others.take("a")
        assert admission.num_open == 1, "who was refused gives nothing back"
    with admission.places() as places:
        places.take("a")
    admission.is_draining = True
    with admission.places() as places, pytest.raises(PeerUnavailableError):
        places.take("d")
    assert admission.num_open == 0


async def test_admission_over_time_is_bounded_with_an_exact_hint() -> None:
    clock = Clock()
    admission = Admission(100, 1, RateLimit(4.0, clock))
    with admission.places() as places:
        for _ in range(4):
            places.take("")
        with pytest.raises(OutOfCapacityError) as caught:
            places.take("x")
        assert caught.value.retry_after_s == pytest.approx(0.25)
        clock.now_s += 0.25
        places.take("x")
    assert admission.num_open == 0


async def test_the_outbox_merges_for_slow_readers_and_is_bounded() -> None:
    """CASES G10."""
    outbox = Outbox(2, max_unread_tokens=5)
    for choice, text in ((0, "a"), (0, "b"), (1, "x"), (0, "c")):
        outbox.put(Delta(choice, text, [1], []))
    outbox.put(Delta(0, "", [], [], GenerateFinish()))
    with pytest.raises(SlowConsumerError, match="6 tokens"):
        outbox.put(Delta(1, "y", [1, 2], []))
    got = [await outbox.get() for _ in range(3)]
    assert [(d.choice, d.text, len(d.token_ids), d.finish is not None) for d in got if d] == [
        (0, "ab", 2, False),
        (1, "x", 1, False),
        (0, "c", 1, True),
    ]
    waiting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(Delta(1, "z", [], [], GenerateFinish()))
    delta = await waiting
    assert delta is not None
    assert delta.text == "z"
    assert await outbox.get() is None


async def test_what_waits_is_delivered_before_a_failure() -> None:
    outbox = Outbox(1, 10)
    outbox.put(Delta(0, "a", [1], []))
    outbox.fail(PeerUnavailableError("first"))
    outbox.fail(PeerUnavailableError("second"))
    assert (await outbox.get()) is not None
    with pytest.raises(PeerUnavailableError, match="first"):
        await outbox.get()


async def test_a_whole_answer_is_no_failure() -> None:
    """A router that stops fails what is open, also what its client has only to read."""
    outbox = Outbox(1, 10)
    outbox.put(Delta(0, "a", [1], [], GenerateFinish()))
    outbox.fail(PeerUnavailableError("this router is stopping"))
    assert (await outbox.get()) is not None
    assert await outbox.get() is None


def test_figures_sum_reports_and_count_unreported_attempts_from_messages() -> None:
    """CASES S38: accepted plus rounds equals the tokens after the first."""
    figures = SpeculationFigures()
    figures.attempt_started(draft_nodes=4)
    for num_tokens in (1, 3, 2):
        figures.tokens_came(num_tokens)
    figures.attempt_ended(None)
    assert (figures.total.rounds, figures.total.drafted, figures.total.accepted) == (2, 6, 3)
    assert (figures.total.first_round_drafted, figures.total.first_round_accepted) == (3, 2)
    figures.attempt_started(draft_nodes=4)
    figures.attempt_ended(SpeculationStats(rounds=5, drafted=15, accepted=7, tree_origin=TreeOrigin.TREE_ORIGIN_REAL))
    assert (figures.total.rounds, figures.total.accepted) == (7, 10)
    assert figures.total.tree_origin == TreeOrigin.TREE_ORIGIN_REAL
    plain = SpeculationFigures()
    plain.attempt_started(draft_nodes=0)
    plain.tokens_came(1)
    plain.tokens_came(1)
    plain.attempt_ended(None)
    assert plain.total == SpeculationStats()


@pytest.mark.parametrize("lost", [None, SpeculationStats(tree_origin=TreeOrigin.TREE_ORIGIN_NONE)])
def test_the_first_tree_that_came_has_an_origin(lost: SpeculationStats | None) -> None:
    """CASES X54: the first attempt ended before its tree came, with a report or without."""
    figures = SpeculationFigures()
    figures.attempt_started(draft_nodes=4)
    figures.tokens_came(1)
    figures.attempt_ended(lost)
    for origin in (TreeOrigin.TREE_ORIGIN_ROOT_ONLY, TreeOrigin.TREE_ORIGIN_REAL):
        figures.attempt_started(draft_nodes=4)
        figures.attempt_ended(SpeculationStats(rounds=1, drafted=3, tree_origin=origin))
    assert figures.total.tree_origin == TreeOrigin.TREE_ORIGIN_ROOT_ONLY


async def test_a_model_is_built_once_however_many_workers_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that come up together all tell their card; building it takes seconds, and memory, each time."""
    built: list[str] = []
    load = ServedModel.load

    def counted(card: ModelCard) -> ServedModel:
        built.append(card.model_id)
        return load(card)

    monkeypatch.setattr(ServedModel, "load", counted)
    with ThreadPoolExecutor(2) as executor:
        store = ModelStore(executor)
        cards = [model_card(), model_card(), model_card(model_id="other"), model_card()]
        models = await asyncio.gather(*map(store.load, cards))
    assert built == ["tiny"]  # names are not what is built
    assert models[0] is models[1] is models[3]
    assert [model.model_id for model in models] == ["tiny", "tiny", "other", "tiny"]


def test_choice_seeds_differ_and_the_first_is_the_clients() -> None:
    seeds = {choice_seed(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(64)}
    assert len(seeds) == 3 * 64
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(7, 0) == 7


# --- metrics and imports --------------------------------------------------------------------------------------


def test_metric_names_are_clean_and_labels_bounded() -> None:
    """CASES X10: the accept length is a ratio of two counters."""
    names = [metric.name for metric in ROUTER_METRICS]
    assert len(set(names)) == len(names)
    for metric in ROUTER_METRICS:
        assert metric.name.startswith("graftline_router_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert set(metric.labels) <= {"model", "outcome", "reason", "leg", "role", "worker", "tree_origin", "objective"}
        assert metric.help.endswith(".")
    exposition = Metrics(ProcessRole.ROUTER).exposition().decode()
    assert all(name.removesuffix("_total") in exposition for name in names)
    assert "graftline_router" not in Metrics(ProcessRole.DECODE).exposition().decode()


def test_importing_the_router_and_client_leaves_torch_out() -> None:
    code = (
        "import sys, graftline.router.server, graftline.client; "
        "heavy = {'torch', 'numpy', 'transformers', 'mooncake'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
