"""One peer of the Mooncake transport: contact, the spelling of its name, what the engine still holds, its speed."""

import threading
import time
from collections.abc import Sequence

from graftline.errors import TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import Engine, MooncakeConfig
from graftline.kv_transfer.transport import MemoryRegions

UNDER_WAY = 0
DONE = 1
MAX_SPELLINGS = 16
_LOSS = 0.98  # a write: the best rate and the worst sleep that were seen are forgotten slowly
_LEAST_RATED_BYTES = 1 << 20
# A process that stood still for long would do without sleeping for hundreds of writes otherwise.
_LEAST_OVERSLEEP_S, _MOST_OVERSLEEP_S = 200e-6, 5e-3


class _Probe:
    """One question for a sign of life, asked in a daemon thread because it may block for a minute."""

    def __init__(self, engine: Engine, session_id: str) -> None:
        self._answered = threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._ask, args=(engine, session_id), daemon=True, name="probe")
        self._thread.start()

    def _ask(self, engine: Engine, session_id: str) -> None:
        self._code = engine.send_probe(session_id)
        self._answered.set()

    @property
    def pending(self) -> bool:
        return not self._answered.is_set()

    def wait(self, timeout_s: float) -> int | None:
        """The engine's answer, 0 for a live peer; None when the time is up."""
        return self._code if self._answered.wait(max(0.0, timeout_s)) else None


class Session:
    """What is known of one peer. Everything but `turn` is its holder's.

    Args:
        opening: held during a first contact, which peers make one after another.
        regions: what is registered here.
        spelling: see `target`.

    Attributes:
        turn: held by whoever writes.
        abandoned: batches given up on; the engine still holds them.
        rate: the best bytes a second of late, 0 before the first write.
        oversleep_s: how much too long a sleep took of late at worst, within bounds; never quite nothing.
        forgotten: the peer is gone, and its name may be another process's by now; set by whoever forgets it.
    """

    def __init__(
        self,
        engine: Engine,
        config: MooncakeConfig,
        session_id: str,
        opening: threading.Lock,
        regions: MemoryRegions,
        spelling: int = 0,
    ) -> None:
        self.engine = engine
        self.config = config
        self._regions = regions
        self.session_id = session_id
        self.turn = threading.Lock()
        self.abandoned: list[int] = []
        self.rate = 0.0
        self.oversleep_s = _LEAST_OVERSLEEP_S
        self.forgotten = False
        self._opening = opening
        self._reachable = False
        self._opened = False
        self._probe: _Probe | None = None
        self.respell(spelling)

    @property
    def is_quick(self) -> bool:
        """Whether a submit does not block: the peer was heard of, written to, and has not failed since, and nobody is
        in a first contact, during which the engine's lock of all peers is held.
        """
        return self._reachable and self._opened and not self._opening.locked()

    @property
    def is_open(self) -> bool:
        """Whether the engine took a write since the last failure: the next one makes no first contact."""
        return self._opened

    def respell(self, spelling: int) -> None:
        """Leading zeros of the port make the engine see a new peer, and shake hands anew."""
        host, _, port = self.session_id.rpartition(":")
        self.spelling = spelling
        self._target = f"{host}:{'0' * spelling}{port}"

    def distrust(self) -> None:
        """A write failed: the next one asks for a sign of life first."""
        self._reachable = self._opened = False

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Takes what was written in how long as a measure of the way, if it was not too little."""
        if num_bytes >= _LEAST_RATED_BYTES and seconds > 0:
            self.rate = max(num_bytes / seconds, _LOSS * self.rate)
        self.oversleep_s = max(_LEAST_OVERSLEEP_S, _LOSS * self.oversleep_s)

    def sleep(self, seconds: float) -> None:
        """Sleeps, and learns how inexact that is here: it depends on the machine, and on who else wants to run."""
        start_s = time.monotonic()
        time.sleep(seconds)
        too_long_s = time.monotonic() - start_s - seconds
        self.oversleep_s = max(self.oversleep_s, min(too_long_s, _MOST_OVERSLEEP_S))

    def make_contact(self, deadline_s: float) -> None:
        """Asks a peer that has not been heard of, or that just failed, for a sign of life.

        Raises:
            TransferFailedError: there was none in time, or the peer was forgotten and whoever answers has its port;
                drained.
        """
        if not self._reachable:
            self._ask(deadline_s)
        if self.forgotten:
            raise TransferFailedError(f"{self.session_id} is gone", drained=True)

    def _ask(self, deadline_s: float) -> None:
        if self._probe is None or not self._probe.pending:
            self._probe = _Probe(self.engine, self.session_id)
        patience_s = min(self.config.contact_timeout_s, deadline_s - time.monotonic())
        code = self._probe.wait(patience_s)
        if code is None:
            raise TransferFailedError(f"{self.session_id} did not answer in {patience_s:.1f} s", drained=True)
        self._probe = None
        if code != 0:
            raise TransferFailedError(f"{self.session_id} cannot be reached ({code})", drained=True)
        self._reachable = True

    def reach(self, src_address: int) -> int:
        """Where a copy from there must end at the latest."""
        return min(self._regions.end_of(src_address), src_address + self.config.max_copy_bytes)

    def submit(self, copies: Sequence[Copy], deadline_s: float) -> int | None:
        """Hands copies to the engine; their batch, None when the engine did not take them."""
        if self._opened:
            return self._hand_over(copies)
        if not self._opening.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            return None
        try:
            batch_id = self._hand_over(copies)
        finally:
            self._opening.release()
        self._opened = batch_id is not None
        return batch_id

    def reap(self) -> int:
        """Lets the engine free batches that were given up on and have ended since; how many are left."""
        if self.abandoned:
            check = self.engine.transfer_check_status
            self.abandoned = [batch_id for batch_id in self.abandoned if check(batch_id) == UNDER_WAY]
        return len(self.abandoned)

    def _hand_over(self, copies: Sequence[Copy]) -> int | None:
        if len(copies) == 1:
            return _batch_id(self.engine.transfer_submit_write(self._target, *copies[0]))
        sources, targets, lengths = map(list, zip(*copies, strict=True))
        return _batch_id(self.engine.batch_transfer_async_write(self._target, sources, targets, lengths))


def _batch_id(answer: int) -> int | None:
    """A failed submit answers 0 or -1, the latter also as an unsigned number; none of these may be asked about."""
    return answer if 0 < answer < (1 << 64) - 1 else None
