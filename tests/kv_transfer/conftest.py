from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mooncake_peer import MooncakePeer


@pytest.fixture
def start_peer() -> Iterator[Callable[..., MooncakePeer]]:
    """Starts peers and kills them at the end of the test."""
    peers: list[MooncakePeer] = []

    def start(num_bytes: int = 1 << 22, **config: Any) -> MooncakePeer:
        peers.append(MooncakePeer(num_bytes, **config))
        return peers[-1]

    yield start
    for peer in peers:
        peer.stop()
