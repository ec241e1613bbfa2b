"""The knobs of the decode service that are about waiting and limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Bounds of every wait, queue and retry of the decode service.

    Attributes:
        pair_timeout_s: for the first contact with a prefill.
        peer_silence_s: a prefill from which nothing is heard for so long is dead or frozen.
        drain_timeout_s: for a prefill's answer to a cancel, as long as it is heard; it waits for writes under way.
        send_timeout_s: how long a caller may leave one message unread.
        max_unsent_tokens: tokens that may wait for a slow caller before it is cut.
        max_open: requests open at once; further ones are refused.
        max_preemptions: how often one call prefills again by itself after its pages were taken.
        max_peers: prefills that are remembered; idle ones are forgotten beyond it.
        real_tree: ask prefills for a real first tree.
    """

    pair_timeout_s: float = 2.5
    peer_silence_s: float = 2.5
    drain_timeout_s: float = 40.0
    send_timeout_s: float = 30.0
    max_unsent_tokens: int = 4096
    max_open: int = 8192
    max_preemptions: int = 16
    max_peers: int = 256
    real_tree: bool = True
