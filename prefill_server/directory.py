"""Which decodes a prefill may write to: checked against our own layouts, one incarnation an address."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from graftline.errors import InvalidRequestError
from graftline.kv_transfer.copy_plan import require_matched
from graftline.kv_transfer.layout import WorkerLayout
from graftline.kv_transfer.routed_transport import require_reachable
from graftline.proto.v1 import common_pb2
from graftline.worker.facts import encode_peer


class PairingEngine(Protocol):
    """What the directory asks of the engine; thread-safe, never blocking."""

    def pair(self, peer: str, layout: bytes) -> None:
        """A decode's pools may be written to from now on."""

    def forget(self, peer: str) -> None:
        """A decode is gone."""


class EngineDirectory:
    """A `PeerDirectory` over the engine.

    Args:
        own: our stages.
        max_peers: decodes remembered; the one paired longest ago is forgotten beyond it, and pairs again by itself.
    """

    def __init__(self, engine: PairingEngine, own: Sequence[common_pb2.StageLayout], max_peers: int) -> None:
        self._engine = engine
        self._own = WorkerLayout.from_proto(own)
        self._max_peers = max_peers
        self._address_of: OrderedDict[str, str] = OrderedDict()

    def pair(self, decode: common_pb2.WorkerIdentity, stages: Sequence[common_pb2.StageLayout]) -> None:
        """See `PeerDirectory.pair`."""
        if not decode.address:
            raise InvalidRequestError("decode.address", "is empty")
        layout = WorkerLayout.from_proto(stages)
        require_matched(self._own, layout)
        require_reachable(self._own, layout)
        restarted = [peer for peer, address in self._address_of.items() if address == decode.address]
        for peer in restarted:
            if peer != decode.incarnation:
                self._forget(peer)
        self._address_of[decode.incarnation] = decode.address
        self._address_of.move_to_end(decode.incarnation)
        while len(self._address_of) > self._max_peers:
            self._forget(next(iter(self._address_of)))
        self._engine.pair(decode.incarnation, encode_peer(stages))

    def is_paired(self, decode_incarnation: str) -> bool:
        """See `PeerDirectory.is_paired`."""
        return decode_incarnation in self._address_of

    def _forget(self, peer: str) -> None:
        del self._address_of[peer]
        self._engine.forget(peer)
