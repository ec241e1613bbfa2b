"""Both handoff machines together, every interleaving: two requests, one page, two incarnations of the prefill.

The world around the machines is a small model: FIFO streams that break and lose what is in flight, engines whose
events are under way while other things happen, writes that land late, a prefill that is killed and restarted.
After every transition: a write lands only in pages held or quarantined for its request, and a caller is told
once. At the end: from every reachable state the goal (all ended, nothing held) can be reached without any help
from timers or further faults.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from graftline.decode_server import handoff as decode
from graftline.engine import service_api as api
from graftline.engine.request import DraftTree, FinishReason, PageId, SlotId, Token, TreeOrigin
from graftline.errors import CancelledRequestError, OutOfCapacityError
from graftline.prefill_server import handoff as prefill

TOKEN = Token(7)
COUNTS = api.SpeculationCounts()
DESTINATION = api.Destination((PageId(0),), SlotId(0))
FINISHED = api.PrefillFinished(DraftTree.root_only(7), TreeOrigin.ROOT_ONLY, api.HandoffCounts())

# Names of messages, so that worlds are small and hashable.
FROM_PREFILL: dict[str, api.PrefillEvent] = {
    "scheduled": api.Scheduled(0),
    "first": api.FirstToken(TOKEN),
    "first-ends": api.FirstToken(TOKEN),
    "finished": FINISHED,
    "failed-drained": api.PrefillFailed(api.PrefillFailure.INTERNAL, "model", drained=True),
    "failed-undrained": api.PrefillFailed(api.PrefillFailure.TRANSFER_FAILED, "model", drained=False),
    "refused": api.PrefillFailed(api.PrefillFailure.OUT_OF_CAPACITY, "model", drained=True),
    "drained": api.Drained(),
}
TO_PREFILL: dict[str, prefill.Message] = {
    "start": prefill.Start(),
    "destination": prefill.SetDestination(DESTINATION),
    "cancel": prefill.Cancel(),
}
FROM_DECODE_ENGINE: dict[str, api.DecodeEvent] = {
    "reserved": api.Reserved(DESTINATION),
    "tokens": api.Tokens.of(TOKEN),
    "finished": api.DecodeFinished(FinishReason.LENGTH, None, COUNTS),
    "preempted": api.Preempted(COUNTS),
    "cancelled": api.DecodeCancelled(),
}


class Model(NamedTuple):
    """One request in the world. `pe` and `de` are the two engines' views of it."""

    d: decode.State
    p: prefill.State | None = None
    incarnation: int = 0  # 0: not begun
    broken: bool = False
    d2p: tuple[str, ...] = ()
    p2d: tuple[str, ...] = ()
    e2p: tuple[str, ...] = ()
    e2d: tuple[str, ...] = ()
    pe: str = "none"  # queued, computing, sampled, final, draining, done
    has_destination: bool = False
    in_flight: bool = False
    stray: bool = False  # the engine gave up on a write that may still land
    de: str = "none"  # line, held, running, done
    told: int = 0


class World(NamedTuple):
    requests: tuple[Model, ...]
    page: str = "free"  # "r0", "q0": held by, in quarantine for request 0
    line: tuple[int, ...] = ()
    incarnation: int = 1
    faults_left: int = 0


class BrokenPromiseError(AssertionError):
    pass


def with_request(world: World, index: int, **changes: object) -> World:
    requests = list(world.requests)
    requests[index] = requests[index]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(requests=tuple(requests))


@cache
def decode_step(state: decode.State, name: str, kind: str) -> decode.Step:
    match kind:
        case "prefill" if name == "first-ends":
            return decode.step(state, decode.FirstTokenEnds(TOKEN, FinishReason.LENGTH, None))
        case "prefill":
            return decode.step(state, FROM_PREFILL[name])
        case "engine":
            return decode.step(state, FROM_DECODE_ENGINE[name])
    others: dict[str, decode.Message] = {
        "lost": decode.StreamLost("model"),
        "silent": decode.StreamLost("model", silent=True),
        "drain-timeout": decode.DrainTimedOut(),
        "gone": decode.CallerGone(CancelledRequestError("model")),
        "reserve-refused": decode.ReserveRefused(OutOfCapacityError("model")),
    }
    return decode.step(state, others[name])


def tell_decode(world: World, index: int, name: str, kind: str) -> World:
    state, actions = decode_step(world.requests[index].d, name, kind)
    world = with_request(world, index, d=state)
    for action in actions:
        world = do_decode_action(world, index, action)
    return world


def do_decode_action(world: World, index: int, action: decode.Action) -> World:
    request = world.requests[index]
    match action:
        case decode.Reserve():
            return with_request(world, index, de="line")._replace(line=(*world.line, index))
        case decode.SendDestination():
            return send_to_prefill(world, index, "destination")
        case decode.SendCancel():
            return send_to_prefill(world, index, "cancel")
        case decode.DropStream():
            return break_stream(world, index)
        case decode.StartDecoding():
            if request.in_flight or request.de != "held":
                raise BrokenPromiseError("decoding started before the last write")
            return with_request(world, index, de="running")
        case decode.Release() | decode.Quarantine():
            world = with_request(world, index, de="done")._replace(line=tuple(i for i in world.line if i != index))
            if world.page != f"r{index}":
                return world
            return world._replace(page="free" if isinstance(action, decode.Release) else f"q{index}")
        case decode.CancelDecoding():
            return end_decoding(world, index, "cancelled") if request.de == "running" else world
        case decode.Emit():
            if request.told:
                raise BrokenPromiseError("a token after the outcome")
            return world
        case decode.Tell():
            return with_request(world, index, told=request.told + 1)


def end_decoding(world: World, index: int, event: str) -> World:
    return with_request(world, index, de="done", e2d=(*world.requests[index].e2d, event))._replace(page="free")


def send_to_prefill(world: World, index: int, name: str) -> World:
    request = world.requests[index]
    return world if request.broken else with_request(world, index, d2p=(*request.d2p, name))


def break_stream(world: World, index: int) -> World:
    return with_request(world, index, broken=True, d2p=(), p2d=())


@cache
def prefill_step(state: prefill.State, message: prefill.Message) -> prefill.Step:
    return prefill.step(state, message)


def tell_prefill(world: World, index: int, message: prefill.Message, name: str) -> World:
    state = world.requests[index].p
    assert state is not None
    state, actions = prefill_step(state, message)
    world = with_request(world, index, p=state)
    for action in actions:
        request = world.requests[index]
        match action:
            case prefill.Submit():
                world = with_request(world, index, pe="queued")
            case prefill.SetDestination():
                world = with_request(world, index, has_destination=True)
            case prefill.CancelEngine():
                world = cancel_prefill_engine(world, index)
            case prefill.Send(event) if not request.broken:
                sent = name if name in FROM_PREFILL else "drained" if isinstance(event, api.Drained) else "refused"
                world = with_request(world, index, p2d=(*request.p2d, sent))
    return world


def cancel_prefill_engine(world: World, index: int) -> World:
    request = world.requests[index]
    if request.pe in {"none", "done", "draining"}:
        return world
    if request.in_flight:
        return with_request(world, index, pe="draining")
    return end_prefill_engine(world, index, "drained")


def end_prefill_engine(world: World, index: int, event: str) -> World:
    return with_request(world, index, pe="done", e2p=(*world.requests[index].e2p, event))


def land(world: World, index: int) -> None:
    if world.page not in {f"r{index}", f"q{index}"}:
        raise BrokenPromiseError(f"a write of request {index} landed in a page that is {world.page}")


# --- transitions -------------------------------------------------------------------------------------------------


def ordinary(world: World) -> Iterator[tuple[str, World]]:
    """What happens by itself, without faults, timers or impatience."""
    for index, request in enumerate(world.requests):
        if request.incarnation == 0:
            yield f"begin {index}", begin(world, index)
            continue
        yield from messages(world, index, request)
        yield from prefill_engine(world, index, request)
        if request.de == "running":
            yield f"decode finishes {index}", end_decoding(world, index, "finished")
            if "tokens" not in request.e2d:
                yield f"tokens {index}", with_request(world, index, e2d=(*request.e2d, "tokens"))
    if world.line and world.page == "free":
        first = world.line[0]
        held = with_request(world, first, de="held", e2d=(*world.requests[first].e2d, "reserved"))
        yield f"reserve {first}", held._replace(page=f"r{first}", line=world.line[1:])
    if world.page.startswith("q"):
        owner = world.requests[int(world.page[1])]
        if not owner.in_flight and not owner.stray and owner.pe in {"done", "none"}:
            yield "quarantine times out", world._replace(page="free")


def begin(world: World, index: int) -> World:
    world = with_request(world, index, incarnation=world.incarnation, p=prefill.State(), d2p=("start",))
    if world.page.startswith("q") and world.requests[int(world.page[1])].incarnation < world.incarnation:
        return world._replace(page="free")  # forget_peer: pairing showed a new incarnation
    return world


def messages(world: World, index: int, request: Model) -> Iterator[tuple[str, World]]:
    if request.d2p and request.p is not None:
        name = request.d2p[0]
        rest = with_request(world, index, d2p=request.d2p[1:])
        yield f"{name} > prefill {index}", tell_prefill(rest, index, TO_PREFILL[name], name)
    if request.p2d:
        name = request.p2d[0]
        yield (
            f"{name} > decode {index}",
            tell_decode(with_request(world, index, p2d=request.p2d[1:]), index, name, "prefill"),
        )
    if request.e2p and request.p is not None:
        name = request.e2p[0]
        rest = with_request(world, index, e2p=request.e2p[1:])
        yield f"{name} of prefill engine {index}", tell_prefill(rest, index, FROM_PREFILL[name], name)
    if request.e2d:
        name = request.e2d[0]
        rest = with_request(world, index, e2d=request.e2d[1:])
        yield f"{name} of decode engine {index}", tell_decode(rest, index, name, "engine")
    if request.broken and request.p is not None and request.p.stream_open:
        yield f"prefill {index} sees the break", tell_prefill(world, index, prefill.StreamClosed(), "closed")
    if request.broken and request.d.leg in {decode.Leg.OPEN, decode.Leg.CANCELLING}:
        yield f"decode {index} sees the break", tell_decode(world, index, "lost", "other")


def prefill_engine(world: World, index: int, request: Model) -> Iterator[tuple[str, World]]:
    e2p = request.e2p
    match request.pe:
        case "queued":
            yield f"schedule {index}", with_request(world, index, pe="computing", e2p=(*e2p, "scheduled"))
        case "computing":
            names = ("first", "first-ends") if request.d.wants_pages else ("first-ends",)
            for name in names:
                yield f"{name} sampled {index}", with_request(world, index, pe="sampled", e2p=(*e2p, name))
        case "sampled" if request.has_destination and not request.in_flight:
            yield f"last write {index}", with_request(world, index, pe="final", in_flight=True)
    if request.pe in {"computing", "sampled"} and request.has_destination and not request.in_flight:
        yield f"write {index}", with_request(world, index, in_flight=True)
    if request.in_flight:
        land(world, index)
        landed = with_request(world, index, in_flight=False)
        if request.pe == "final":
            landed = end_prefill_engine(landed, index, "finished")
        elif request.pe == "draining":
            landed = end_prefill_engine(landed, index, "drained")
        yield f"land {index}", landed
    if request.stray:
        land(world, index)
        yield f"stray write lands {index}", with_request(world, index, stray=False)


def faults(world: World) -> Iterator[tuple[str, World]]:
    """What may go wrong, at any time, as long as the budget lasts."""
    if world.faults_left == 0:
        return
    world = world._replace(faults_left=world.faults_left - 1)
    for index, request in enumerate(world.requests):
        if request.incarnation == 0:
            continue
        if not request.broken:
            yield f"break {index}", break_stream(world, index)
        if not request.told:
            yield f"caller gone {index}", tell_decode(world, index, "gone", "other")
        if request.d.leg in {decode.Leg.OPEN, decode.Leg.CANCELLING}:
            yield f"silent {index}", tell_decode(world, index, "silent", "other")
        if request.d.leg is decode.Leg.CANCELLING:
            yield f"drain timeout {index}", tell_decode(world, index, "drain-timeout", "other")
        if request.de == "line":
            left = with_request(world, index, de="done")._replace(line=tuple(i for i in world.line if i != index))
            yield f"reserve refused {index}", tell_decode(left, index, "reserve-refused", "other")
        if request.pe in {"queued", "computing", "sampled", "final", "draining"}:
            event = "failed-undrained" if request.in_flight else "failed-drained"
            failed = with_request(world, index, stray=request.in_flight, in_flight=False)
            yield f"prefill engine fails {index}", end_prefill_engine(failed, index, event)
        if request.de == "running":
            yield f"preempt {index}", end_decoding(world, index, "preempted")
        if request.d2p and request.p is not None and not request.broken:
            yield f"duplicate {index}", with_request(world, index, d2p=(request.d2p[0], *request.d2p))
        if request.p2d and not request.broken:
            yield f"duplicate back {index}", with_request(world, index, p2d=(request.p2d[0], *request.p2d))
    if world.incarnation == 1:
        yield "prefill killed", kill_prefill(world)


def kill_prefill(world: World) -> World:
    """The process is gone, and with it its transfer session and every write; another one starts at its address."""
    for index, request in enumerate(world.requests):
        if request.incarnation == 1:
            world = break_stream(world, index)
            world = with_request(world, index, p=None, pe="done", e2p=(), in_flight=False, stray=False)
    return world._replace(incarnation=2)


# --- exploration -------------------------------------------------------------------------------------------------


def is_goal(world: World) -> bool:
    return (
        all(
            request.told == 1
            and request.d.ended
            and (request.p is None or request.p.ended)
            and request.de in {"none", "done"}
            and not request.in_flight
            for request in world.requests
        )
        and not world.line
        and world.page == "free"
    )


def check(world: World) -> None:
    for request in world.requests:
        if request.told > 1:
            raise BrokenPromiseError("the caller was told twice")
        if request.d.ended and request.de not in {"none", "done"}:
            raise BrokenPromiseError(f"the decode ended and its engine still has the request {request.de}")


def explore(start: World) -> int:
    """Walks every reachable world.

    Returns:
        How many there are.

    Raises:
        BrokenPromiseError: naming the transitions that lead to a wrong or stuck world.
    """
    index_of = {start: 0}
    came_from: list[tuple[int, str]] = [(-1, "start")]
    backwards: list[list[int]] = [[]]
    goals: list[int] = []
    frontier = deque([start])

    def path(index: int) -> str:
        steps: list[str] = []
        while index >= 0:
            index, step = came_from[index]
            steps.append(step)
        return "\n  ".join(reversed(steps))

    while frontier:
        world = frontier.popleft()
        here = index_of[world]
        try:
            check(world)
            if is_goal(world):
                goals.append(here)
            for helpful, transitions in ((True, ordinary(world)), (False, faults(world))):
                for name, following in transitions:
                    there = index_of.get(following)
                    if there is None:
                        there = index_of[following] = len(came_from)
                        came_from.append((here, name))
                        backwards.append([])
                        frontier.append(following)
                    if helpful:
                        backwards[there].append(here)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"{error} after\n  {path(here)}") from error
    reached = set(goals)
    pending = list(goals)
    while pending:
        for earlier in backwards[pending.pop()]:
            if earlier not in reached:
                reached.add(earlier)
                pending.append(earlier)
    stuck = next((index for index in range(len(came_from)) if index not in reached), None)
    if stuck is not None:
        raise BrokenPromiseError(f"no way out after\n  {path(stuck)}")
    return len(came_from)


def world_of(*wants_pages: bool, num_faults: int) -> World:
    return World(tuple(Model(decode.State(wants_pages=wants)) for wants in wants_pages), faults_left=num_faults)


@pytest.mark.parametrize("wants_pages", [True, False])
def test_one_request_survives_any_three_faults(wants_pages: bool) -> None:
    """CASES B01, B06, B11, B15, B19: every place for up to three faults in one handoff."""
    assert explore(world_of(wants_pages, num_faults=3)) > 1000


def test_two_requests_share_a_page_through_any_fault() -> None:
    """CASES B01, B02, B11: the second waits for the first one's page; a killed prefill comes back as another."""
    assert explore(world_of(True, True, num_faults=1)) > 50_000


@pytest.mark.slow
def test_two_requests_share_a_page_through_any_two_faults() -> None:
    assert explore(world_of(True, True, num_faults=2)) > 600_000


def without_quarantine(state: decode.State, actions: tuple[decode.Action, ...]) -> decode.Step:
    return state, tuple(decode.Release() if isinstance(action, decode.Quarantine) else action for action in actions)


def without_cancel(state: decode.State, actions: tuple[decode.Action, ...]) -> decode.Step:
    return state, tuple(action for action in actions if not isinstance(action, decode.SendCancel))


def without_release(state: decode.State, actions: tuple[decode.Action, ...]) -> decode.Step:
    return state, tuple(action for action in actions if not isinstance(action, decode.Release))


def with_early_release(state: decode.State, actions: tuple[decode.Action, ...]) -> decode.Step:
    if any(isinstance(action, decode.SendCancel) for action in actions):
        return state, (*actions, decode.Release())
    return state, actions


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (without_quarantine, "landed in a page"),
        (with_early_release, "landed in a page"),
        (without_cancel, "no way out"),
        (without_release, "its engine still has the request"),
    ],
)
def test_the_model_sees_a_broken_machine(
    broken: Callable[[decode.State, tuple[decode.Action, ...]], decode.Step],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without quarantine, cancel or release, or with pages freed at the cancel, the exploration fails."""
    right = decode_step
    monkeypatch.setattr(
        sys.modules[__name__], "decode_step", lambda state, name, kind: broken(*right(state, name, kind))
    )
    with pytest.raises(BrokenPromiseError, match=complaint):
        explore(world_of(True, num_faults=2))
