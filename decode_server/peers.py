"""The prefills a decode knows: one channel an address, paired once an incarnation."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from graftline.errors import IncompatibleError, OutOfCapacityError, PeerUnavailableError
from graftline.proto.channel import Access, open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

logger = logging.getLogger(__name__)

# Streams that a prefill has not answered yet: taking them all up at once would keep it from whatever else it does.
MAX_OPENING = 128


@dataclass(slots=True)
class Peer:
    """A prefill at one address.

    Attributes:
        incarnation: whom this decode is paired with; None when it has to pair (again).
        last_incarnation: whom it was paired with before that.
        num_open: handoffs that use the channel.
        num_heard: messages of all handoffs so far.
        opening: places of handoffs that it has not said anything of.
    """

    address: str
    channel: aio.Channel
    stub: "prefill_pb2_grpc.PrefillServiceAsyncStub"
    incarnation: str | None = None
    last_incarnation: str | None = None
    num_open: int = 0
    num_heard: int = 0
    pairing: asyncio.Lock = field(default_factory=asyncio.Lock)
    opening: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPENING))


class PrefillPeers:
    """Pairs with prefills and remembers the outcome until it turns out wrong."""

    def __init__(
        self,
        *,
        identity: common_pb2.WorkerIdentity,
        fingerprint: common_pb2.Fingerprint,
        layouts: Sequence[common_pb2.StageLayout],
        access: Access,
        pair_timeout_s: float,
        max_peers: int,
        forget_incarnation: Callable[[str], None],
    ) -> None:
        self._pair_request = prefill_pb2.PairRequest(decode=identity, fingerprint=fingerprint, stages=layouts)
        self._access = access
        self._pair_timeout_s = pair_timeout_s
        self._max_peers = max_peers
        self._forget_incarnation = forget_incarnation
        self._peers: OrderedDict[str, Peer] = OrderedDict()

    async def paired(self, address: str) -> Peer:
        """The prefill at `address`, paired with.

        Raises:
            IncompatibleError: it differs in what must agree.
            PeerUnavailableError: it cannot be reached.
            OutOfCapacityError: too many prefills are in use at once.
        """
        peer = await self._peer(address)
        async with peer.pairing:
            if peer.incarnation is None:
                await self._pair(peer)
        return peer

    async def opening(self, address: str) -> Peer:
        """Likewise, with a place in its `opening`, which is the caller's to give back. Raises as `paired`."""
        while True:
            peer = await self.paired(address)
            await peer.opening.acquire()
            if peer.incarnation is not None:
                return peer
            peer.opening.release()  # it was found to be gone meanwhile

    def unpair(self, peer: Peer, incarnation: str) -> None:
        """That incarnation is gone, or does not know this decode: pair anew before the next handoff."""
        if peer.incarnation == incarnation:
            peer.incarnation = None

    async def close(self) -> None:
        """Closes every channel."""
        for peer in self._peers.values():
            await peer.channel.close()
        self._peers.clear()

    async def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            await self._make_room()
        if address not in self._peers:
            channel = open_channel(address, self._access)
            self._peers[address] = Peer(address, channel, prefill_pb2_grpc.PrefillServiceStub(channel))
        self._peers.move_to_end(address)
        return self._peers[address]

    async def _make_room(self) -> None:
        if len(self._peers) < self._max_peers:
            return
        idle = next((peer for peer in self._peers.values() if not peer.num_open and not peer.pairing.locked()), None)
        if idle is None:
            raise OutOfCapacityError(f"all of {len(self._peers)} prefills are in use")
        del self._peers[idle.address]
        await idle.channel.close()

    async def _pair(self, peer: Peer) -> None:
        try:
            response = await peer.stub.Pair(
                self._pair_request, timeout=self._pair_timeout_s, metadata=self._access.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            cause = error_from_rpc(error)
            if isinstance(cause, IncompatibleError):
                raise cause from error
            raise PeerUnavailableError(f"prefill {peer.address}: {cause}") from error
        if response.mismatched_fields:
            raise IncompatibleError(tuple(response.mismatched_fields), f"prefill {peer.address}: {response.detail}")
        peer.incarnation = response.prefill.incarnation
        if peer.last_incarnation not in {None, peer.incarnation}:
            self._forget_incarnation(peer.last_incarnation)
        peer.last_incarnation = peer.incarnation
        logger.info("paired with prefill %s (%s)", peer.address, peer.incarnation)
