"""The ways into one stage of a peer, and writes that go by the next one when a way does not work.

That both ends offer a way does not prove that it works between them: GPUs of one host without peer access, or in
containers that do not see each other's, cannot open each other's memory, and it is the first write that finds out.
"""

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from graftline.errors import GraftlineError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.protocol_choice import TransferPath
from graftline.kv_transfer.transport import GroupedWrite, Refused, Transport, WriteGroup

logger = logging.getLogger(__name__)


class Way(NamedTuple):
    """A way to a peer's stage, and the stage's session there."""

    path: TransferPath
    transport: Transport
    session_id: str


class PeerRoute:
    """The ways to a peer's stage that have not refused a write.

    Args:
        name: of the stage, for logs.
        ways: fastest first; at least one.
    """

    def __init__(self, name: str, ways: Sequence[Way]) -> None:
        self._name = name
        self._all = tuple(ways)
        self._left = list(ways)
        self._lock = threading.Lock()  # guards changes of _left

    @property
    def way(self) -> Way:
        """The one to write by."""
        return self._left[0]

    def give_up(self, way: Way, error: GraftlineError) -> bool:
        """A way refused a write; whether there is another one."""
        with self._lock:
            if way == self._left[0] and len(self._left) > 1:
                del self._left[0]
                logger.warning(
                    "%s is written to by %s from now on: %s does not work: %s",
                    self._name,
                    self._left[0].path.value,
                    way.path.value,
                    error,
                )
            return way != self._left[0]

    def write(self, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Transport.write`."""
        while True:
            way = self.way
            try:
                return way.transport.write(way.session_id, copies, deadline_s)
            except TransferFailedError as error:
                if not (error.refused and self.give_up(way, error)):
                    raise

    def begin(self, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        """See `Transport.begin`."""
        way = self.way
        if way == self._all[-1]:  # nothing to fall back on
            return way.transport.begin(way.session_id, writes, refused)
        return _FallingGroup(self, way, writes, refused)

    def forget(self) -> None:
        """See `Transport.forget`."""
        for way in self._all:
            way.transport.forget(way.session_id)


class _StartedWrite:
    """A `GroupedWrite` whose copies are known already."""

    def __init__(self, write: GroupedWrite, copies: Sequence[Copy]) -> None:
        self.deadline_s = write.deadline_s
        self.end = write.end
        self._copies = copies

    def start(self) -> Sequence[Copy]:
        """See `GroupedWrite`."""
        return self._copies


class _FallingGroup:
    """A `WriteGroup` whose writes go by the next way when one refuses them."""

    def __init__(self, route: PeerRoute, way: Way, writes: Sequence[GroupedWrite], refused: Refused | None) -> None:
        self._route = route
        self._way = way
        self._refused = refused
        self._aside: list[_StartedWrite] = []
        self._is_over = False
        self._group = way.transport.begin(way.session_id, writes, self._put_aside)

    def advance(self, until_s: float) -> bool:
        """See `WriteGroup`."""
        self._is_over = self._is_over or self._group.advance(until_s)
        return self._is_over and not self._aside

    def finish(self) -> None:
        """See `WriteGroup`."""
        if not self._is_over:
            self._group.finish()
            self._is_over = True
        while self._aside:
            again, self._aside = self._aside, []
            self._way = self._route.way
            self._way.transport.begin(self._way.session_id, again, self._put_aside).finish()

    def _put_aside(self, write: GroupedWrite, copies: Sequence[Copy], error: TransferFailedError) -> bool:
        """A write was refused; whether it is tried by another way."""
        if self._route.give_up(self._way, error):
            self._aside.append(_StartedWrite(write, copies))
            return True
        return self._refused is not None and self._refused(write, copies, error)
