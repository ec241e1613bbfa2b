"""The knobs of the prefill service that are about waiting and limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Bounds of every wait and queue of the prefill service.

    Attributes:
        first_alive_s: after so long a decode hears that its handoff was taken up, if it has nothing else to hear.
        alive_interval_s: how often a waiting decode hears that this process is alive.
        handoff_timeout_s: longest life of one handoff, whatever it waits for.
        send_timeout_s: how long a decode may leave one message unread.
        max_handoffs: handoffs open at once; further ones are refused.
        max_peers: decodes remembered at once.
    """

    first_alive_s: float = 0.1
    alive_interval_s: float = 0.5
    handoff_timeout_s: float = 900.0
    send_timeout_s: float = 5.0
    max_handoffs: int = 8192
    max_peers: int = 256
