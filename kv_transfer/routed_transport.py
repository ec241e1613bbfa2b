"""A transport made of several, one for each way bytes can go: peers of one process may need different ones.

An engine of the transfer library settles on its way when it starts. So each way has an engine, a session and its own
registrations of the pools, and a peer is written to by the fastest way that both sides have and that works.
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from graftline.errors import IncompatibleError, PeerUnavailableError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.layout import StageLayout, WorkerLayout
from graftline.kv_transfer.peer_route import PeerRoute, Way
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath, common_paths
from graftline.kv_transfer.transport import GroupedWrite, Refused, Transport, WriteGroup

logger = logging.getLogger(__name__)


class RoutedTransport:
    """A `Transport` over one or more ways. Sessions without a chosen way go by the last one, which every peer has.

    Args:
        ways: fastest first; at least one.
        host_id: where this process runs; see `protocol_choice.host_id`.
    """

    def __init__(self, ways: Mapping[TransferPath, Transport], host_id: str) -> None:
        assert ways, "a process without any way to its peers"
        self._ways = dict(ways)
        self._host_id = host_id
        self._routes: dict[str, PeerRoute] = {}
        self._lock = threading.Lock()  # guards changes of _routes

    @property
    def session_id(self) -> str:
        """See `Transport`: that of the way which every peer has."""
        return self._common.session_id

    @property
    def host_id(self) -> str:
        """Where this process runs."""
        return self._host_id

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The ways into this process."""
        return tuple(Endpoint(path, way.session_id) for path, way in self._ways.items())

    def register(self, address: int, num_bytes: int) -> None:
        """See `Transport`. A way that cannot take the region, other than the common one, is given up.

        Raises:
            PeerUnavailableError: the common way refused.
        """
        for path, way in list(self._ways.items()):
            try:
                way.register(address, num_bytes)
            except PeerUnavailableError as error:
                if way is self._common:
                    raise
                logger.warning("no transfers by %s: %s", path.value, error)
                del self._ways[path]
                way.close()

    def reached(self, peer: WorkerLayout) -> WorkerLayout:
        """A peer's layout with the session under which each of its stages is written to from here.

        Raises:
            IncompatibleError: there is no way that both have.
        """
        return WorkerLayout(tuple(self._reached(stage) for stage in peer.stages))

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Transport`."""
        self._route_to(session_id).write(copies, deadline_s)

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        """See `Transport`."""
        return self._route_to(session_id).begin(writes, refused)

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        with self._lock:
            route = self._routes.pop(session_id, None)
        (route or self._common_route(session_id)).forget()

    def close(self) -> None:
        """See `Transport`."""
        for way in self._ways.values():
            way.close()

    @property
    def _common(self) -> Transport:
        return list(self._ways.values())[-1]

    def _route_to(self, session_id: str) -> PeerRoute:
        """That of a reached stage; by the common way to any other session."""
        return self._routes.get(session_id) or self._common_route(session_id)

    def _common_route(self, session_id: str) -> PeerRoute:
        path, way = list(self._ways.items())[-1]
        return PeerRoute(session_id, [Way(path, way, session_id)])

    def _reached(self, stage: StageLayout) -> StageLayout:
        endpoints = common_endpoints(self._host_id, self._ways, stage)
        first = endpoints[0]
        ways = [Way(end.path, self._ways.get(end.path, self._common), end.session_id) for end in endpoints]
        with self._lock:
            self._routes[first.session_id] = PeerRoute(f"stage {stage.stage} of a peer", ways)
        logger.info("stage %d of a peer is written to by %s", stage.stage, first.path.value)
        return replace(stage, session_id=first.session_id)


def common_endpoints(host_id: str, paths: Collection[TransferPath], stage: StageLayout) -> list[Endpoint]:
    """The ways from a process with these paths into a peer's stage, fastest first; one that names none is taken at its
    session.

    Raises:
        IncompatibleError: there is no way that both have.
    """
    if not stage.endpoints:
        return [Endpoint(TransferPath.TCP, stage.session_id)]
    sessions = {endpoint.path: endpoint.session_id for endpoint in stage.endpoints}
    found = common_paths(host_id, stage.host_id, paths, sessions)
    if not found:
        theirs, ours = (", ".join(path.value for path in offered) or "no way" for offered in (sessions, paths))
        raise IncompatibleError(
            ("transfer_protocol",),
            f"transfer_protocol: stage {stage.stage} is reached by {theirs}, the source has {ours}",
        )
    return [Endpoint(path, sessions[path]) for path in found]


def require_reachable(source: WorkerLayout, destination: WorkerLayout) -> None:
    """Passes when every stage of the source has a way into every stage of the destination.

    Raises:
        IncompatibleError: see `common_endpoints`.
    """
    for ours in source.stages:
        for theirs in destination.stages:
            if ours.endpoints:
                common_endpoints(ours.host_id, [endpoint.path for endpoint in ours.endpoints], theirs)
