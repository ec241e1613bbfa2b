"""Writes to one Mooncake peer that go out together; when something fails, each write that it touched is tried alone."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from graftline.errors import GraftlineError, InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy, size_of
from graftline.kv_transfer.mooncake_attempt import Attempt, WriteState
from graftline.kv_transfer.mooncake_session import MAX_SPELLINGS, Session
from graftline.kv_transfer.transport import GroupedWrite, MemoryRegions, Refused, is_taken_over

_QUICK_FAILURE_S = 0.5


class MooncakeGroup:
    """A `WriteGroup`.

    Args:
        regions: where copies may be read.
        max_copy_bytes: longer copies are cut.
        enter: counts a writer and gives the peer's session, or raises because the transport is closed.
        leave: takes the count back.
        refused: see `Transport.begin`.
    """

    def __init__(
        self,
        writes: Sequence[GroupedWrite],
        regions: MemoryRegions,
        max_copy_bytes: int,
        enter: Callable[[], Session],
        leave: Callable[[], None],
        refused: Refused | None = None,
    ) -> None:
        self._states = self._started(writes)
        self._regions = regions
        self._max_copy_bytes = max_copy_bytes
        self._enter = enter
        self._leave = leave
        self._refused = refused
        self._session: Session | None = None  # whose turn is held
        self._attempt: Attempt | None = None

    def advance(self, until_s: float) -> bool:
        """See `WriteGroup`: only a peer that is open and not busy is written to, by a way that is quick."""
        if self._attempt is None:
            session = self._quick_session()
            if session is None:
                return False
            self._attempt = Attempt(session, self._states)
        try:
            if not self._attempt.run(until_s) or self._attempt.broken:
                return False
        except BaseException:
            self._release()
            raise
        self._attempt.teach()
        self._release()
        return True

    def finish(self) -> None:
        """See `WriteGroup`."""
        try:
            if self._session is not None and self._attempt is not None:
                self._complete(self._session, self._attempt)
            for head in self._states:
                self._write_from(head)
        finally:
            self._release()

    # --- turns ---------------------------------------------------------------------------------------------------

    def _quick_session(self) -> Session | None:
        """The session, with its turn, when a write to it can begin at once."""
        try:
            session = self._enter()
        except GraftlineError:
            return None  # `finish` meets it again
        if session.config.spin_s and session.turn.acquire(blocking=False):
            self._session = session
            session.reap()
            if session.is_quick:
                return session
            self._release()
        else:
            self._leave()
        return None

    def _take_turn(self, deadline_s: float) -> Session:
        """The session, with its turn.

        Raises:
            InvalidRequestError: there can be no such session.
            TransferFailedError: the transport is closed, or others write until the deadline.
        """
        if self._session is not None:
            return self._session
        session = self._enter()
        if not session.turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            self._leave()
            raise TransferFailedError(f"{session.session_id} stayed busy until the deadline", drained=True)
        self._session = session
        return session

    def _release(self) -> None:
        if self._session is not None:
            self._session.turn.release()
            self._session = None
            self._leave()

    # --- writes --------------------------------------------------------------------------------------------------

    def _started(self, writes: Iterable[GroupedWrite]) -> Iterator[WriteState]:
        """Writes that are still wanted and possible, each when its turn has come."""
        for write in writes:
            copies = write.start()
            if copies is None:
                continue
            num_bytes = size_of(copies)
            try:
                self._regions.require_sources(copies)
            except InvalidRequestError as error:
                write.end(error, 0.0)
                continue
            if num_bytes > self._max_copy_bytes:
                copies = _cut(copies, self._max_copy_bytes)
            if copies:
                yield WriteState(write, copies, num_bytes, write.deadline_s)
            else:
                write.end(None, 0.0)

    def _write_from(self, head: WriteState) -> None:
        """A write, and with it those behind it, as far as nothing fails."""
        try:
            session = self._take_turn(head.deadline_s)
            session.reap()
            session.make_contact(head.deadline_s)
        except GraftlineError as error:
            head.write.end(error, 0.0)
            return
        self._complete(session, Attempt(session, chain((head,), self._states)))

    def _complete(self, session: Session, attempt: Attempt) -> None:
        """Sees an attempt through, and gives what failed in it its second try."""
        attempt.run(float("inf"))
        if not attempt.broken:
            attempt.teach()
            return
        session.distrust()
        spelling = session.spelling
        for state in attempt.begun:
            if not state.ended:
                self._retry(session, state, attempt.seconds, spelling)

    def _retry(self, session: Session, state: WriteState, seconds: float, spelling: int) -> None:
        """One write alone, what of it did not arrive: once, if its failure was quick or only another one failed."""
        error = state.failure(session.session_id, "failed", seconds)
        if state.failed and (seconds >= _QUICK_FAILURE_S or session.spelling >= MAX_SPELLINGS):
            state.write.end(error, seconds)
            return
        try:
            session.make_contact(state.deadline_s)
        except TransferFailedError as gone:
            error.__cause__ = gone
            state.write.end(error, seconds)
            return
        if state.failed and session.spelling == spelling:  # the first of its attempt
            session.respell(spelling + 1)
        state.renew()
        second = Attempt(session, iter((state,)))
        second.run(float("inf"))
        if second.broken:
            session.distrust()
        if not state.ended:
            error = state.refusal(session.session_id, second.seconds)
            if not is_taken_over(state.write, state.copies, error, self._refused):
                state.write.end(error, second.seconds)


def _cut(copies: Sequence[Copy], max_bytes: int) -> Sequence[Copy]:
    """The same bytes in copies of at most `max_bytes`."""
    return [
        Copy(src + offset, dst + offset, min(max_bytes, num_bytes - offset))
        for src, dst, num_bytes in copies
        for offset in range(0, num_bytes, max_bytes)
    ]


class LoneWrite:
    """A `GroupedWrite` of its own, for who waits for it."""

    def __init__(self, copies: Sequence[Copy], deadline_s: float) -> None:
        self._copies = copies
        self._deadline_s = deadline_s
        self._error: GraftlineError | None = None

    @property
    def deadline_s(self) -> float:
        """See `GroupedWrite`."""
        return self._deadline_s

    def start(self) -> Sequence[Copy]:
        """See `GroupedWrite`."""
        return self._copies

    def end(self, error: GraftlineError | None, seconds: float) -> None:
        """See `GroupedWrite`."""
        self._error = error

    def raise_error(self) -> None:
        """Passes when the write succeeded."""
        if self._error is not None:
            raise self._error
