"""The prefill's side of one handoff as a pure state machine; docs/handoff.md is its table.

Knows no gRPC, no engine and no clock: `step` maps (state, message) to (state, actions), so that a test can walk
every interleaving. Late and duplicate messages are ignored, never asserted.
"""

from dataclasses import dataclass, replace
from enum import Enum

from graftline.engine.service_api import (
    Destination,
    Drained,
    FirstToken,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Scheduled,
)


class Phase(Enum):
    """Where a handoff stands."""

    AWAIT_START = "await-start"
    ACTIVE = "active"
    CANCELLING = "cancelling"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class State:
    """One handoff of a prefill.

    Attributes:
        stream_open: the decode can still be told something.
        has_destination: the engine knows where to write.
    """

    phase: Phase = Phase.AWAIT_START
    stream_open: bool = True
    has_destination: bool = False

    @property
    def ended(self) -> bool:
        """Nothing of the handoff is held here any more."""
        return self.phase is Phase.ENDED


# --- messages: from the decode, from the service, from the engine (`PrefillEvent`) -------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The decode's first message."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine, or a check before it, did not take the request."""

    code: PrefillFailure
    reason: str


@dataclass(frozen=True, slots=True)
class SetDestination:
    """The decode's pages and slot. Also the action that hands them to the engine."""

    destination: Destination


@dataclass(frozen=True, slots=True)
class Cancel:
    """The decode wants no more; the service says it too when the worker shuts down or the handoff is too old."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The decode closed its half, cancelled the call, or is gone."""


Message = Start | Refused | SetDestination | Cancel | StreamClosed | PrefillEvent

# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the request of the start message to the engine; a refusal comes back as `Refused`."""


@dataclass(frozen=True, slots=True)
class CancelEngine:
    """Ask the engine to end the request."""


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the decode."""

    event: PrefillEvent


Action = Submit | SetDestination | CancelEngine | Send
Step = tuple[State, tuple[Action, ...]]


def step(state: State, message: Message) -> Step:
    """What follows from `message` in `state`."""
    match state.phase:
        case Phase.AWAIT_START:
            return _before_start(state, message)
        case Phase.ACTIVE:
            return _active(state, message)
        case Phase.CANCELLING:
            return _cancelling(state, message)
        case Phase.ENDED:
            return state, ()


def _before_start(state: State, message: Message) -> Step:
    match message:
        case Start():
            return replace(state, phase=Phase.ACTIVE), (Submit(),)
        case SetDestination():
            problem = "a destination came before the start message"
            return _end(state, PrefillFailed(PrefillFailure.INVALID_REQUEST, problem, drained=True))
        case Cancel():
            return _end(state, Drained())
        case StreamClosed():
            return replace(state, phase=Phase.ENDED, stream_open=False), ()
    return state, ()


def _active(state: State, message: Message) -> Step:
    match message:
        case Refused(code, reason):
            return _end(state, PrefillFailed(code, reason, drained=True))
        case SetDestination() if not state.has_destination:
            return replace(state, has_destination=True), (message,)
        case Cancel():
            return replace(state, phase=Phase.CANCELLING), (CancelEngine(),)
        case StreamClosed():
            return replace(state, phase=Phase.CANCELLING, stream_open=False), (CancelEngine(),)
        case Scheduled() | FirstToken():
            return state, (Send(message),)
        case PrefillFinished() | PrefillFailed() | Drained():
            return _end(state, message)
    return state, ()


def _cancelling(state: State, message: Message) -> Step:
    match message:
        case StreamClosed():
            return replace(state, stream_open=False), ()
        case PrefillFinished() | PrefillFailed() | Drained():
            return _end(state, message)
    return state, ()


def _end(state: State, terminal: PrefillFinished | PrefillFailed | Drained) -> Step:
    ended = replace(state, phase=Phase.ENDED)
    return ended, (Send(terminal),) if state.stream_open else ()
