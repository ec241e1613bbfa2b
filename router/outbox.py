"""Between the tasks that generate and the one that writes to the client: bounded, and never waited on when full."""

from collections import deque

from graftline.errors import GraftlineError, OutOfCapacityError
from graftline.router.transcript import Delta
from graftline.wakeup import Wakeup
from graftline.write_guard import WriteGuard


class SlowConsumerError(OutOfCapacityError):
    """The client reads too slowly."""


def client_guard(timeout_s: float) -> WriteGuard:
    """Around the messages to a client: one that takes longer over one than so many seconds is cut."""
    return WriteGuard(timeout_s, SlowConsumerError, "the client did not take a message")


class Outbox:
    """Deltas of all choices of one request, in order.

    A client that reads slowly gets several deltas of a choice merged into one, so that the memory is the output
    itself. Beyond `max_unread_tokens` the request is cut.
    """

    def __init__(self, num_choices: int, max_unread_tokens: int) -> None:
        self._open_choices = num_choices
        self._max_unread_tokens = max_unread_tokens
        self._waiting: deque[Delta] = deque()
        self._num_unread_tokens = 0
        self._error: GraftlineError | None = None
        self._something = Wakeup()

    def put(self, delta: Delta) -> None:
        """Adds a delta.

        Raises:
            SlowConsumerError: too many tokens wait.
        """
        self._num_unread_tokens += len(delta.token_ids)
        if self._num_unread_tokens > self._max_unread_tokens:
            raise SlowConsumerError(
                f"the client reads too slowly: {self._num_unread_tokens} tokens wait, {self._max_unread_tokens} may"
            )
        self._waiting.append(delta)
        self._something.wake()

    def fail(self, error: GraftlineError) -> None:
        """The request failed; the first error counts. Deltas that wait are delivered: all of them are an answer."""
        if self._error is None:
            self._error = error
        self._something.wake()

    async def get(self) -> Delta | None:
        """The next delta; None after the last choice has finished.

        Raises:
            GraftlineError: what the request failed with.
        """
        while not self._waiting:
            if self._open_choices == 0:
                return None
            if self._error is not None:
                raise self._error
            await self._something.wait()
        delta = self._merged()
        self._num_unread_tokens -= len(delta.token_ids)
        if delta.finish is not None:
            self._open_choices -= 1
        return delta

    def _merged(self) -> Delta:
        delta = self._waiting.popleft()
        while delta.finish is None and self._waiting and self._waiting[0].choice == delta.choice:
            following = self._waiting.popleft()
            delta.text += following.text
            delta.token_ids += following.token_ids
            delta.logprobs += following.logprobs
            delta.finish = following.finish
        return delta
