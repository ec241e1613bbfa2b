"""Does what the prefill's handoff machine says, for one handoff, on the event loop's thread.

Lives from the first message of the stream until the engine has let go of the request, whether or not the stream
is still there.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from graftline.engine.request import Request
from graftline.engine.service_api import (
    Destination,
    FirstToken,
    PrefillEngine,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
)
from graftline.errors import GraftlineError, InvalidRequestError, OutOfCapacityError
from graftline.prefill_server import handoff
from graftline.prefill_server.traces import HandoffTrace
from graftline.worker.mailbox import Mailbox

logger = logging.getLogger(__name__)


class HandoffDriver:
    """One handoff.

    Attributes:
        outbox: events for the decode, in order; a terminal one is the last.
        outcome: how it ended, as a label of metrics.
        first_token_s: from the start message to the first token; None before.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        timeout_s: float,
        on_ended: Callable[["HandoffDriver"], None],
        trace: HandoffTrace,
    ) -> None:
        self.outbox: asyncio.Queue[PrefillEvent] = asyncio.Queue()
        self.request: Request | None = None
        self.outcome = "cancelled"
        self.first_token_s: float | None = None
        self._begun_s = time.monotonic()
        self._decode_incarnation = ""
        self._real_tree = True
        self._engine = engine
        self._on_ended = on_ended
        self._trace = trace
        self._state = handoff.State()
        self._mailbox: Mailbox[handoff.Message] = Mailbox(self._step)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self.post, handoff.Cancel())

    @property
    def started(self) -> bool:
        """The start message came."""
        return self._state.phase is not handoff.Phase.AWAIT_START

    @property
    def age_s(self) -> float:
        """Seconds since the start message, or since the stream was opened."""
        return time.monotonic() - self._begun_s

    def start(self, request: Request, decode_incarnation: str, real_tree: bool) -> None:
        """The start message; a second one is ignored."""
        if self.started:
            return
        self.request, self._decode_incarnation, self._real_tree = request, decode_incarnation, real_tree
        self._begun_s = time.monotonic()
        self._trace.started(request)
        self.post(handoff.Start())

    def refuse(self, code: PrefillFailure, reason: str) -> None:
        """The start message cannot be taken."""
        if self.started:
            return
        self._state, _ = handoff.step(self._state, handoff.Start())
        self.post(handoff.Refused(code, reason))

    def set_destination(self, destination: Destination) -> None:
        """The decode's answer to `Scheduled`."""
        self.post(handoff.SetDestination(destination))

    def post(self, message: handoff.Message) -> None:
        """Takes a message and acts on it; never blocks. An action may post in its turn."""
        self._mailbox.post(message)

    def _step(self, message: handoff.Message) -> None:
        if self._state.ended:
            return
        self._note(message)
        self._state, actions = handoff.step(self._state, message)
        for action in actions:
            self._do(action)
        if self._state.ended:
            self._timer.cancel()
            self._trace.ended(self.outcome)
            self._on_ended(self)

    def _note(self, message: handoff.Message) -> None:
        self._trace.saw(message)
        match message:
            case FirstToken() if self.first_token_s is None:
                self.first_token_s = self.age_s
            case PrefillFinished():
                self.outcome = "finished"
            case PrefillFailed(code=code) | handoff.Refused(code=code):
                self.outcome = code.value

    def _do(self, action: handoff.Action) -> None:
        match action:
            case handoff.Submit():
                self._submit()
            case handoff.SetDestination(destination):
                self._engine.set_destination(self._started_request().key, destination)
            case handoff.CancelEngine():
                self._engine.cancel(self._started_request().key)
            case handoff.Send(event):
                self.outbox.put_nowait(event)

    def _submit(self) -> None:
        try:
            self._engine.submit(self._started_request(), self._decode_incarnation, self._real_tree, self._deliver)
        except InvalidRequestError as error:
            self.post(handoff.Refused(PrefillFailure.INVALID_REQUEST, str(error)))
        except OutOfCapacityError as error:
            self.post(handoff.Refused(PrefillFailure.OUT_OF_CAPACITY, str(error)))
        except GraftlineError as error:
            self.post(handoff.Refused(PrefillFailure.DRAINING, str(error)))
        except Exception as error:  # a fault of ours, over which the engine has not taken the request
            logger.exception("%s could not be submitted", self._started_request().key)
            self.post(handoff.Refused(PrefillFailure.INTERNAL, f"{type(error).__name__}: {error}"))

    def _deliver(self, event: PrefillEvent) -> None:
        """Called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody is left to tell.
            return

    def _started_request(self) -> Request:
        assert self.request is not None, "the machine acts on a request only after its start"
        return self.request
