"""One pass of the engine over the copies of some writes: which are submitted together, and what became of each write.

It reports writes that arrived or whose deadline passed; what else is left is its caller's to retry.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graftline.errors import TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_session import DONE, UNDER_WAY, Session
from graftline.kv_transfer.transport import GroupedWrite

_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6
_PAUSE_SHARE = 1 / 32  # of the time since the start: what a write may seem longer than it was
_LEAST_MERGED_BYTES = 8 << 20
_MERGED_S = 50e-6  # what a batch takes at least, if that much is there: as long as the next one takes to prepare
_EARLY_SHARE = 0.1  # of the time since the start: a write may arrive so much earlier than expected


@dataclass(slots=True, eq=False)
class WriteState:
    """A write and what became of its copies.

    Attributes:
        copies: as they are handed over, none longer than allowed.
        num_handed: of `copies`, from the front, that the engine was asked to take.
        num_taken: copies that the engine took, in this attempt and those before.
        ended: its end was reported.
    """

    write: GroupedWrite
    copies: Sequence[Copy]
    num_bytes: int
    deadline_s: float
    num_handed: int = 0
    num_arrived: int = 0
    num_taken: int = 0
    failed: Sequence[Copy] = ()
    ended: bool = False

    def renew(self) -> None:
        """What did not arrive becomes all there is to write."""
        self.copies = [*self.failed, *self.copies[self.num_handed :]]
        self.num_handed = self.num_arrived = 0
        self.failed = ()

    def failure(self, session_id: str, how: str, seconds: float) -> TransferFailedError:
        """Of the whole write; drained when the engine never had any of it."""
        count = len(self.copies) - self.num_arrived
        message = f"{count} copies to {session_id} {how} after {seconds:.3f} s"
        return TransferFailedError(message, drained=self.num_taken == 0)

    def refusal(self, session_id: str, seconds: float) -> TransferFailedError:
        """Of the whole write, at a peer that has just answered; refused when the engine, in time, took none of it."""
        error = self.failure(session_id, "failed", seconds)
        error.refused = error.drained and time.monotonic() < self.deadline_s
        return error


Part = tuple[WriteState, Sequence[Copy]]


@dataclass(slots=True, eq=False)
class _Batch:
    batch_id: int
    parts: list[Part]


class Attempt:
    """Submits and polls, oldest first.

    After the first failure nothing more is submitted; what is under way goes on to its end. Nothing of a write is
    submitted after its deadline, so that a process that was stopped for a while does not go on writing into pages that
    have found another owner.

    Args:
        session: its turn is held by the caller.
        states: asked for the next write when that can be submitted.

    Attributes:
        begun: the writes taken from `states`, in order.
        broken: something failed.
    """

    def __init__(self, session: Session, states: Iterator[WriteState]) -> None:
        self._session = session
        self._was_open = session.is_open
        self._config = session.config
        self._check = session.engine.transfer_check_status
        self._states = states
        self._start_s = self._shared_until_s = time.monotonic()
        self._current: WriteState | None = None
        self._is_exhausted = False  # `states` has no more, and nothing of the last one is left
        self._under_way: deque[_Batch] = deque()
        self._submitted_bytes = 0
        self._next_deadline_s = float("inf")
        self._end_s = 0.0
        self.begun: list[WriteState] = []
        self.broken = False
        self.seconds = 0.0

    def teach(self) -> None:
        """The session learns how long everything took; after an attempt that is over and not broken. A first contact,
        which maps the peer's memory, says nothing of the way's speed.
        """
        if self._was_open:
            self._session.learn(self._submitted_bytes, self.seconds)

    def run(self, until_s: float) -> bool:
        """Goes on until all ended, or to `until_s`, or until what is left should arrive later than that.

        Returns:
            Whether it is over: everything arrived or failed.
        """
        while True:
            self._fill()
            if not self._under_way:
                self.seconds = time.monotonic() - self._start_s
                return True
            if self._collect():
                continue
            now_s = time.monotonic()
            if now_s >= self._next_deadline_s:
                self._expire(now_s)
            elif max(now_s, self._end_s) >= until_s:
                return False
            else:
                self._pause(now_s)

    # --- submitting ----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Submits as many batches as may be under way."""
        config = self._config
        while not (self._is_exhausted or self.broken) and len(self._under_way) < config.max_in_flight:
            state = self._next_state()
            if state is None:
                return
            now_s = time.monotonic()
            if now_s >= state.deadline_s:
                self._time_out(state, now_s)
            elif config.copies_per_batch == 1:
                self._submit([(state, self._part(state, 1))])
            else:
                self._submit(self._merged(state, now_s))

    def _next_state(self) -> WriteState | None:
        """A write that has copies left to hand over."""
        state, self._current = self._current, None
        if state is None:
            state = next(self._states, None)
            if state is None:
                self._is_exhausted = True
            else:
                self.begun.append(state)
        return state

    def _part(self, state: WriteState, most: int) -> Sequence[Copy]:
        """The next copies of a write; one that has more left stays the current one."""
        copies, handed = state.copies, state.num_handed
        if len(copies) - handed > most:
            self._current = state
            copies = copies[handed : handed + most]
        elif handed:
            copies = copies[handed:]
        state.num_handed = handed + len(copies)
        return copies

    def _merged(self, state: WriteState, now_s: float) -> list[Part]:
        """Copies for one batch, of several writes if they are small.

        A batch takes about as much as all before it: the first leaves soon, the rest cost few calls, and one is
        prepared while the engine copies another.
        """
        room = self._config.copies_per_batch
        most_bytes = max(_LEAST_MERGED_BYTES, self._submitted_bytes, _MERGED_S * self._session.rate)
        parts: list[Part] = []
        num_bytes = 0
        while True:
            part = self._part(state, room)
            parts.append((state, part))
            room -= len(part)
            num_bytes += state.num_bytes
            following = self._next_state() if room and num_bytes < most_bytes else None
            if following is None:
                return parts
            if now_s >= following.deadline_s:
                self._current = following
                return parts
            state = following

    def _joined(self, parts: list[Part]) -> list[Copy]:
        """All copies of a batch; where a write goes on behind the one before it on both sides, as those of a prompt's
        chunks do, the two meet in one copy.

        None leaves its pool here. That pool's pages go into one pool of a peer, so none leaves that either; if one did,
        the engine would not take it, and each write would be tried alone.
        """
        joined: list[Copy] = []
        src = dst = num_bytes = reach = 0
        for _, part in parts:
            next_src, next_dst, next_bytes = part[0]
            if next_src - src == num_bytes == next_dst - dst and next_src + next_bytes <= reach:
                num_bytes += next_bytes
                joined[-1] = Copy(src, dst, num_bytes)
                part = part[1:]
                if not part:
                    continue
            joined += part
            src, dst, num_bytes = part[-1]
            reach = self._session.reach(src)
        return joined

    def _submit(self, parts: list[Part]) -> None:
        copies = parts[0][1] if len(parts) == 1 else self._joined(parts)
        deadline_s = min([state.deadline_s for state, _ in parts])
        batch_id = self._session.submit(copies, deadline_s)
        if batch_id is None:
            self._fail(parts)
            return
        self._under_way.append(_Batch(batch_id, parts))
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        for state, part in parts:
            if not state.num_taken:
                self._submitted_bytes += state.num_bytes
            state.num_taken += len(part)
        rate = self._session.rate
        if rate and self._config.spin_s:
            self._end_s = self._start_s + self._submitted_bytes / rate

    # --- ends ----------------------------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Takes the oldest batches' ends, as far as they have ended; whether any has."""
        arrived: list[WriteState] = []
        was_under_way = len(self._under_way)
        while self._under_way:
            batch = self._under_way[0]
            status = self._check(batch.batch_id)
            if status == UNDER_WAY:
                break
            self._under_way.popleft()
            if status != DONE:
                self._fail(batch.parts)
                continue
            for state, part in batch.parts:
                state.num_arrived += len(part)
                if state.num_arrived == len(state.copies) and not state.ended:
                    state.ended = True
                    arrived.append(state)
        if arrived:
            self._report(arrived)
        return len(self._under_way) < was_under_way

    def _report(self, arrived: list[WriteState]) -> None:
        """Writes that were seen to arrive together share the time since the last report, by bytes."""
        now_s = time.monotonic()
        seconds, self._shared_until_s = now_s - self._shared_until_s, now_s
        total = sum(state.num_bytes for state in arrived)
        for state in arrived:
            state.write.end(None, seconds * state.num_bytes / total)

    def _fail(self, parts: list[Part]) -> None:
        self.broken = True
        for state, part in parts:
            state.failed = [*state.failed, *part]

    def _expire(self, now_s: float) -> None:
        """Ends writes whose deadline has passed; the engine keeps batches in which nobody has an interest any more."""
        for batch in self._under_way:
            for state, _ in batch.parts:
                if now_s >= state.deadline_s and not state.ended:
                    self._time_out(state, now_s)
        for batch in list(self._under_way):
            if all(state.ended for state, _ in batch.parts):
                self._under_way.remove(batch)
                self._session.abandoned.append(batch.batch_id)
        waiting = (state.deadline_s for batch in self._under_way for state, _ in batch.parts if not state.ended)
        self._next_deadline_s = min(waiting, default=float("inf"))

    def _time_out(self, state: WriteState, now_s: float) -> None:
        self.broken = True
        state.ended = True
        seconds = now_s - self._start_s
        state.write.end(state.failure(self._session.session_id, "were not acknowledged in time", seconds), seconds)

    def _pause(self, now_s: float) -> None:
        """Sleeps up to shortly before the expected end, then asks again and again for a while, then ever less often.

        No sleep is long: what was learned while writes waited for something else must not make all later ones slow. And
        none ends late, as far as that can be known: a write that is seen late makes the next one expected later.
        """
        config = self._config
        expected_s = max(0.0, self._end_s - self._start_s)
        early_s = self._end_s - _EARLY_SHARE * expected_s - self._session.oversleep_s
        if now_s < early_s:
            self._session.sleep(min(_LONGEST_PAUSE_S, early_s - now_s))
        elif now_s >= max(self._start_s, self._end_s) + config.spin_s + expected_s:
            time.sleep(min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, _PAUSE_SHARE * (now_s - self._start_s))))
