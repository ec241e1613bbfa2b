"""Goodput: which requests kept to the objectives, and first rounds by the origin of their tree."""

from collections.abc import Sequence

import pytest

from graftline.errors import PeerUnavailableError
from graftline.metrics import (
    FIRST_ROUND_ACCEPTED,
    FIRST_ROUNDS,
    INTER_TOKEN,
    OBJECTIVE,
    REQUESTS_ENDED,
    WITHIN_OBJECTIVE,
    Metrics,
    ProcessRole,
)
from graftline.proto.v1.common_pb2 import FinishReason, SpeculationStats, TreeOrigin
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.config import Objectives
from graftline.router.observer import ModelInstruments, RequestObserver

OBJECTIVES = Objectives(first_token_s=0.5, per_token_s=0.1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def finish(origin: TreeOrigin = TreeOrigin.TREE_ORIGIN_REAL) -> GenerateFinish:
    stats = SpeculationStats(rounds=3, drafted=9, accepted=4, first_round_drafted=3, first_round_accepted=2)
    stats.tree_origin = origin
    return GenerateFinish(reason=FinishReason.FINISH_REASON_STOP, speculation=stats)


def served(arrivals: Sequence[tuple[float, int, int]], *, error: Exception | None = None) -> float:
    """Counts of requests within objectives after one whose tokens came so.

    Args:
        arrivals: seconds after the request, its choice, tokens.
    """
    metrics, clock = Metrics(ProcessRole.ROUTER), Clock()
    observer = RequestObserver(ModelInstruments(metrics, "m", OBJECTIVES), 0.0, clock)
    for clock.now, choice, num_tokens in arrivals:
        observer.tokens_came(choice, num_tokens, 0)
    for _ in {choice for _, choice, _ in arrivals}:
        observer.choice_finished(finish())
    if error is not None:
        observer.failed(error)
    observer.ended()
    return metrics.total(WITHIN_OBJECTIVE)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([(0.5, 0, 1)], 1),  # exactly in time, nothing after it
        ([(0.51, 0, 1)], 0),  # late first token
        ([(0.1, 0, 1), (0.4, 0, 3)], 1),  # 3 tokens in 0.3 s
        ([(0.1, 0, 1), (0.41, 0, 3)], 0),
        ([(0.1, 0, 4), (0.4, 0, 1)], 1),  # tokens that came with the first one give time to the later ones
        ([(0.1, 0, 1), (0.2, 1, 1), (0.25, 0, 2), (0.3, 1, 1)], 1),
        ([(0.1, 0, 1), (0.6, 1, 1)], 0),  # one choice of two is late
    ],
)
def test_requests_within_objectives(arrivals: list[tuple[float, int, int]], expected: int) -> None:
    assert served(arrivals) == expected


def test_failed_requests_are_never_within() -> None:
    assert served([(0.1, 0, 1)], error=PeerUnavailableError("gone")) == 0


def test_nothing_came() -> None:
    """A client that left before its first token did not get what it wanted."""
    assert served([]) == 0


def test_the_objectives_are_exported() -> None:
    metrics = Metrics(ProcessRole.ROUTER)
    ModelInstruments(metrics, "m", OBJECTIVES)
    text = metrics.exposition().decode()
    assert f'{OBJECTIVE.name}{{objective="first_token"}} 0.5' in text
    assert f'{OBJECTIVE.name}{{objective="per_token"}} 0.1' in text


def test_first_rounds_are_counted_by_origin() -> None:
    metrics = Metrics(ProcessRole.ROUTER)
    observer = RequestObserver(ModelInstruments(metrics, "m", OBJECTIVES), 0.0, Clock())
    for origin in (TreeOrigin.TREE_ORIGIN_REAL, TreeOrigin.TREE_ORIGIN_REAL, TreeOrigin.TREE_ORIGIN_ROOT_ONLY):
        observer.choice_finished(finish(origin))
    text = metrics.exposition().decode()
    assert f'{FIRST_ROUNDS.name}{{model="m",tree_origin="real"}} 2.0' in text
    assert f'{FIRST_ROUNDS.name}{{model="m",tree_origin="root_only"}} 1.0' in text
    assert metrics.total(FIRST_ROUND_ACCEPTED) == 6


@pytest.mark.parametrize(("num_finished", "outcome"), [(0, "cancelled"), (1, "cancelled"), (2, "stop")])
def test_a_request_ends_well_with_its_last_choice(num_finished: int, outcome: str) -> None:
    """CASES X51: a client that leaves after one choice of two has cancelled."""
    metrics = Metrics(ProcessRole.ROUTER)
    observer = RequestObserver(ModelInstruments(metrics, "m", OBJECTIVES), 0.0, Clock(), num_choices=2)
    for choice in range(num_finished):
        observer.tokens_came(choice, 1, 0)
        observer.choice_finished(finish())
    observer.ended()
    assert metrics.counter(REQUESTS_ENDED).labels("m", outcome)._value.get() == 1
    assert metrics.total(WITHIN_OBJECTIVE) == (outcome == "stop")


def test_the_time_between_tokens_is_that_of_every_token() -> None:
    """As a decode counts it: a message with many tokens would otherwise weigh as little as one with a single one."""
    metrics, clock = Metrics(ProcessRole.ROUTER), Clock()
    observer = RequestObserver(ModelInstruments(metrics, "m", OBJECTIVES), 0.0, clock)
    for clock.now, num_tokens in ((0.1, 1), (0.3, 1), (0.5, 5)):
        observer.tokens_came(0, num_tokens, 0)
    (family,) = metrics.histogram(INTER_TOKEN).collect()
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert found[INTER_TOKEN.name + "_sum", None] == pytest.approx(0.4)
    assert found[INTER_TOKEN.name + "_count", None] == 6
    assert (found[INTER_TOKEN.name + "_bucket", "0.05"], found[INTER_TOKEN.name + "_bucket", "0.25"]) == (5, 6)
