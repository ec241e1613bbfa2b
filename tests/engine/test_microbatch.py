"""Groups of running requests."""

from random import Random

import pytest

from graftline.engine.decode_request import DecodeRequest
from graftline.engine.microbatch import MicrobatchSet
from graftline.engine.request import Request, RequestId, RequestKey, Sampling, Stopping


def member(order: int) -> DecodeRequest:
    key = RequestKey(RequestId(str(order)), 0)
    request = Request(key, (1,), 1, Sampling(), Stopping(4))
    return DecodeRequest(request, lambda event: None, 64, order=order)


def test_microbatches_fill_evenly_and_take_turns() -> None:
    """CASES P21: with two stages two requests are in flight at once, not one batch of two."""
    batches = MicrobatchSet(2)
    members = [member(order) for order in range(4)]
    for request in members:
        batches.add(request)
    first, second = batches.ready()
    assert ([m.order for m in first.members], [m.order for m in second.members]) == ([0, 2], [1, 3])
    first.launched(7, nodes=4, carries=False)
    assert [batch.index for batch in batches.ready()] == [1]
    with pytest.raises(AssertionError, match="landed"):
        batches.landed(0, 8)
    assert batches.landed(0, 7) == (first, 4)
    assert len(list(batches.ready())) == 2


def test_rounds_ahead_land_in_order() -> None:
    """Contract 4: a microbatch may have a second round under way, not a third."""
    batches = MicrobatchSet(1, rounds_ahead=2)
    batches.add(member(0))
    (batch,) = batches.ready()
    batch.launched(3, nodes=4, carries=True)
    assert list(batches.ready()) == [batch]
    batch.launched(4, nodes=4, carries=True)
    assert list(batches.ready()) == []
    assert batches.landed(0, 3)[0] is batch
    assert list(batches.ready()) == [batch]
    assert batches.landed(0, 4)[0] is batch
    with pytest.raises(AssertionError, match="without one"):
        batches.landed(0, 5)


def test_microbatches_take_turns_with_rounds_ahead() -> None:
    """CASES P21: the first stage never waits for a round of the microbatch it has just sent on."""
    batches = MicrobatchSet(2, rounds_ahead=2)
    batches.add(member(0))
    (first,) = batches.ready()
    first.launched(0, nodes=4, carries=True)
    first.launched(1, nodes=4, carries=True)  # alone, it runs ahead
    batches.add(member(1))
    (second,) = batches.ready()
    second.launched(2, nodes=4, carries=True)
    assert list(batches.ready()) == [], "the first has two under way, the second's turn is over"
    batches.landed(0, 0)
    (turn,) = batches.ready()
    assert turn is first
    first.launched(3, nodes=4, carries=True)
    (turn,) = batches.ready()
    assert turn is second
    second.launched(4, nodes=4, carries=True)
    batches.landed(0, 1)
    (turn,) = batches.ready()
    assert turn is first
    batches.landed(0, 3)
    second.steps.clear()
    first.launched(5, nodes=4, carries=True)
    assert list(batches.ready()) == [second], "who has nothing under way may always start"


def test_who_would_be_levelled_is_overfull() -> None:
    batches = MicrobatchSet(2, rounds_ahead=2)
    for order in range(3):
        batches.add(member(order))
    first, second = batches._batches
    assert not batches.is_overfull(first)
    batches.remove(second.members[0])
    assert batches.is_overfull(first)
    assert not batches.is_overfull(second)


def test_microbatches_are_kept_even() -> None:
    """CASES P21: requests that end unevenly leave no stage without work; who has a round under way stays."""
    batches = MicrobatchSet(2)
    members = [member(order) for order in range(6)]
    for request in members:
        batches.add(request)
    first, second = batches.ready()
    for request in (members[1], members[3], members[5]):
        batches.remove(request)
    members[4].launched.append(1)
    batches.level(first)
    assert ([m.order for m in first.members], [m.order for m in second.members]) == ([0, 4], [2])
    batches.level(first)
    assert [m.order for m in second.members] == [2]
    batches.remove(members[2])
    batches.level(first)
    assert ([m.order for m in first.members], [m.order for m in second.members]) == ([4], [0])


def test_the_youngest_gives_way() -> None:
    batches = MicrobatchSet(2)
    members = [member(order) for order in (4, 6, 5)]
    for request in members:
        batches.add(request)
    assert batches.youngest() is members[1]
    batches.remove(members[1])
    assert batches.youngest() is members[2]


@pytest.mark.parametrize("seed", range(4))
def test_members_come_and_go(seed: int) -> None:
    """CASES S25, S26: any order of joining and leaving, down to empty and back."""
    draw, batches = Random(seed), MicrobatchSet(3)
    inside: list[DecodeRequest] = []
    for order in range(200):
        if inside and draw.random() < (0.9 if order % 50 > 25 else 0.3):
            batches.remove(inside.pop(draw.randrange(len(inside))))
        else:
            inside.append(member(order))
            batches.add(inside[-1])
        batches.remove(member(order))  # never joined: no harm
        assert batches.num_requests == len(inside)
        known = [request for batch in batches.ready() for request in batch.members]
        assert sorted(request.order for request in known) == sorted(request.order for request in inside)
