"""The decode's side of one attempt, handoff and decoding, as a pure state machine; docs/handoff.md is its table.

Knows no gRPC, no engine and no clock: `step` maps (state, message) to (state, actions), so that a test can walk
every interleaving. Three things move on their own: the leg to the prefill, the pages here, and the caller who is
told the outcome exactly once, often before the other two are done. Late and duplicate messages are ignored.
"""

from dataclasses import dataclass, replace
from enum import Enum

from graftline.engine.request import DraftTree, FinishReason, Token
from graftline.engine.service_api import (
    DecodeCancelled,
    DecodeEvent,
    DecodeFailed,
    DecodeFailure,
    DecodeFinished,
    Destination,
    Drained,
    FirstToken,
    Preempted,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Reserved,
    Scheduled,
    SpeculationCounts,
    Tokens,
)
from graftline.errors import (
    GraftlineError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    TransferFailedError,
)
from graftline.proto.status import Leg as FailedLeg


class Leg(Enum):
    """Where the stream to the prefill stands."""

    OPEN = "open"
    # Cancel was sent; the prefill's terminal event is awaited.
    CANCELLING = "cancelling"
    # The prefill's terminal event came: nothing can be written any more (unless it said so).
    CLOSED = "closed"
    # No terminal event will come.
    LOST = "lost"


class Pages(Enum):
    """Who holds pages and slot of the request here."""

    NONE = "none"
    # `reserve` was asked; nobody outside knows any page.
    IN_LINE = "in-line"
    # The prefill knows them and may write at any time.
    EXPOSED = "exposed"
    # Decoding: the engine frees them at its terminal event.
    RUNNING = "running"
    # Freed, or in quarantine.
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class State:
    """One attempt of a decode.

    Attributes:
        wants_pages: False when the first token ends the request whatever it is; then nothing is ever reserved.
        heard: the prefill has answered something.
        has_first_token: the first token came and went on to the caller.
        told: the caller knows the outcome.
    """

    wants_pages: bool = True
    leg: Leg = Leg.OPEN
    pages: Pages = Pages.NONE
    heard: bool = False
    has_first_token: bool = False
    told: bool = False

    @property
    def leg_over(self) -> bool:
        """Nothing will come from the prefill any more, or nothing that counts."""
        return self.leg is Leg.CLOSED or self.leg is Leg.LOST

    @property
    def ended(self) -> bool:
        """Nothing of the attempt is held here or awaited any more."""
        return self.told and self.leg_over and self.pages in {Pages.NONE, Pages.RETURNED}


# --- messages: from the prefill (`PrefillEvent`), from the engine (`DecodeEvent`), from the service --------------


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream to the prefill ended without a terminal event, or (`silent`) said nothing for too long."""

    reason: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class DrainTimedOut:
    """The prefill did not answer a cancel in time."""


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    """The engine did not take the request."""

    error: GraftlineError


@dataclass(frozen=True, slots=True)
class CallerGone:
    """The caller cancelled, its deadline passed, it is cut, or the worker shuts down."""

    error: GraftlineError


@dataclass(frozen=True, slots=True)
class FirstTokenEnds:
    """A first token that is the last one as well."""

    token: Token
    reason: FinishReason
    stop_token_id: int | None


Message = PrefillEvent | FirstTokenEnds | DecodeEvent | StreamLost | DrainTimedOut | ReserveRefused | CallerGone

# --- what the caller is told -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """The request is complete."""

    reason: FinishReason
    stop_token_id: int | None
    speculation: SpeculationCounts


@dataclass(frozen=True, slots=True)
class GoOn:
    """Its pages were taken: prefill prompt and emitted tokens again."""

    speculation: SpeculationCounts


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed.

    Attributes:
        leg: whose fault it was, if a worker's.
        repair: the prefill has never heard of this decode, or never answered: pairing anew may help.
    """

    error: GraftlineError
    leg: FailedLeg | None
    repair: bool = False


Outcome = Done | GoOn | Failed

# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the engine for pages and a slot; a refusal comes back as `ReserveRefused`."""


@dataclass(frozen=True, slots=True)
class SendDestination:
    """Tell the prefill where to write."""

    destination: Destination


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Ask the prefill to stop, and start the drain timer."""


@dataclass(frozen=True, slots=True)
class DropStream:
    """Abandon the stream to the prefill."""


@dataclass(frozen=True, slots=True)
class StartDecoding:
    """Hand the request to the decode loop."""

    tree: DraftTree
    kv_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Release:
    """Free the pages: nobody writes to them."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Put the pages out of use: the prefill may still write to them."""


@dataclass(frozen=True, slots=True)
class CancelDecoding:
    """Ask the engine to end the running request."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens for the caller."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Tell:
    """The outcome for the caller; exactly one an attempt."""

    outcome: Outcome


Action = (
    Reserve
    | SendDestination
    | SendCancel
    | DropStream
    | StartDecoding
    | Release
    | Quarantine
    | CancelDecoding
    | Emit
    | Tell
)
Step = tuple[State, tuple[Action, ...]]


def step(state: State, message: Message) -> Step:
    """What follows from `message` in `state`."""
    match message:
        case Tokens() if state.pages is Pages.RUNNING:
            return state, () if state.told else (Emit(message),)
        case CallerGone(error):
            return _fail(state, Failed(error, None))
        case ReserveRefused(error):
            return _refused(state, error)
        case StreamLost() | DrainTimedOut():
            return _lost(state, message)
        case Reserved() | Tokens() | DecodeFinished() | Preempted() | DecodeFailed() | DecodeCancelled():
            return _from_engine(state, message)
        case _:
            return _from_prefill(replace(state, heard=True), message)


def _from_prefill(state: State, message: PrefillEvent | FirstTokenEnds) -> Step:
    if state.leg_over:
        return state, ()
    match message:
        case PrefillFinished():
            return _finished(replace(state, leg=Leg.CLOSED), message)
        case PrefillFailed():
            state, freed = _return_pages(replace(state, leg=Leg.CLOSED), drained=message.drained)
            state, told = _fail(state, _failed_prefill(message))
            return state, freed + told
        case Drained():
            state, freed = _return_pages(replace(state, leg=Leg.CLOSED), drained=True)
            gone = Failed(PeerUnavailableError("the prefill gave the request up"), FailedLeg.PREFILL)
            state, told = _fail(state, gone)
            return state, freed + told
    if state.told:
        return state, ()
    match message:
        case Scheduled() if state.pages is Pages.NONE and state.wants_pages:
            return replace(state, pages=Pages.IN_LINE), (Reserve(),)
        case FirstToken(token) if not state.has_first_token:
            return replace(state, has_first_token=True), (Emit(Tokens.of(token)),)
        case FirstTokenEnds() if not state.has_first_token:
            done = Done(message.reason, message.stop_token_id, SpeculationCounts())
            state, told = _tell(replace(state, has_first_token=True), done)
            return state, (Emit(Tokens.of(message.token)), *told)
    return state, ()


def _finished(state: State, finished: PrefillFinished) -> Step:
    if state.told:
        return _return_pages(state, drained=True)
    if state.pages is Pages.EXPOSED and state.has_first_token:
        return replace(state, pages=Pages.RUNNING), (StartDecoding(finished.tree, finished.kv_digest),)
    state, freed = _return_pages(state, drained=True)
    confused = InternalError("the prefill finished without a destination or a first token")
    state, told = _fail(state, Failed(confused, FailedLeg.PREFILL))
    return state, freed + told


def _from_engine(state: State, event: DecodeEvent) -> Step:
    match event, state.pages:
        case Reserved(destination), Pages.IN_LINE:
            return replace(state, pages=Pages.EXPOSED), (SendDestination(destination),)
        case DecodeFinished(reason, stop_token_id, speculation), Pages.RUNNING:
            return _tell(replace(state, pages=Pages.RETURNED), Done(reason, stop_token_id, speculation))
        case Preempted(speculation), Pages.RUNNING:
            return _tell(replace(state, pages=Pages.RETURNED), GoOn(speculation))
        case DecodeFailed(), Pages.IN_LINE | Pages.EXPOSED | Pages.RUNNING:
            # What the prefill's side wrote is not what it computed: another one shall try.
            leg = FailedLeg.PREFILL if event.code is DecodeFailure.KV_DIFFERS else FailedLeg.DECODE
            return _fail(replace(state, pages=Pages.RETURNED), Failed(_failed_decode(event), leg))
        case DecodeCancelled(), Pages.RUNNING:
            stopped = PeerUnavailableError("the decode loop stopped")
            return _fail(replace(state, pages=Pages.RETURNED), Failed(stopped, FailedLeg.DECODE))
    return state, ()


def _refused(state: State, error: GraftlineError) -> Step:
    if state.pages is not Pages.IN_LINE:
        return state, ()
    return _fail(replace(state, pages=Pages.RETURNED), Failed(error, FailedLeg.DECODE))


def _lost(state: State, message: StreamLost | DrainTimedOut) -> Step:
    if state.leg_over:
        return state, ()
    if isinstance(message, DrainTimedOut) and state.leg is not Leg.CANCELLING:
        return state, ()
    reason, repair = "it did not answer a cancel", False
    if isinstance(message, StreamLost):
        reason, repair = message.reason, not message.silent and not state.heard
    state, freed = _return_pages(replace(state, leg=Leg.LOST), drained=False)
    lost = Failed(PeerUnavailableError(f"prefill lost: {reason}"), FailedLeg.PREFILL, repair=repair)
    state, told = _fail(state, lost)
    return state, (DropStream(), *freed, *told)


def _return_pages(state: State, *, drained: bool) -> Step:
    """The leg is over: gives pages back that are not decoding."""
    match state.pages:
        case Pages.IN_LINE:
            return replace(state, pages=Pages.RETURNED), (Release(),)
        case Pages.EXPOSED:
            return replace(state, pages=Pages.RETURNED), (Release() if drained else Quarantine(),)
    return state, ()


def _fail(state: State, failed: Failed) -> Step:
    running = state.pages is Pages.RUNNING and not state.told
    state, actions = _tell(state, failed)
    return state, (*actions, CancelDecoding()) if running else actions


def _tell(state: State, outcome: Outcome) -> Step:
    """Tells the caller, once, and stops what still goes on for it."""
    if state.told:
        return state, ()
    state = replace(state, told=True)
    freed: tuple[Action, ...] = ()
    if state.pages is Pages.IN_LINE:
        state, freed = _return_pages(state, drained=True)
    if state.leg is Leg.OPEN:
        return replace(state, leg=Leg.CANCELLING), (Tell(outcome), *freed, SendCancel())
    return state, (Tell(outcome), *freed)


def _failed_decode(event: DecodeFailed) -> GraftlineError:
    """What the decode engine's failure means to the caller."""
    match event.code:
        case DecodeFailure.OUT_OF_CAPACITY:
            return OutOfCapacityError(event.reason, retry_after_s=1.0)
        case DecodeFailure.ENGINE_LOST:
            return PeerUnavailableError(event.reason)
        case DecodeFailure.KV_DIFFERS:
            return TransferFailedError(event.reason, drained=True)
        case DecodeFailure.INTERNAL:
            return InternalError(event.reason)


def _failed_prefill(event: PrefillFailed) -> Failed:
    """What a prefill's failure means to the caller."""
    match event.code:
        case PrefillFailure.INVALID_REQUEST:
            field, _, problem = event.reason.partition(": ")
            error: GraftlineError = InvalidRequestError(field, problem or "refused by the prefill")
        case PrefillFailure.OUT_OF_CAPACITY:
            error = OutOfCapacityError(event.reason)
        case PrefillFailure.TRANSFER_FAILED:
            error = TransferFailedError(event.reason, drained=event.drained)
        case PrefillFailure.NOT_PAIRED | PrefillFailure.DRAINING:
            error = PeerUnavailableError(event.reason)
        case PrefillFailure.INTERNAL:
            error = InternalError(event.reason)
    return Failed(error, FailedLeg.PREFILL, repair=event.code is PrefillFailure.NOT_PAIRED)
