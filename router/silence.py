"""Ends an attempt whose decode says nothing for long, though the worker as a whole looks well."""

from graftline.router.pairing import Claim
from graftline.write_guard import Ticker


class SilenceTimer(Ticker):
    """Around an attempt; `heard()` on every message. Acts between one and two timeouts after the last one.

    Args:
        timeout_s: seconds of silence.
        claim: revoked then, to the decode's account.
    """

    def __init__(self, timeout_s: float, claim: Claim) -> None:
        super().__init__(timeout_s)
        self._claim = claim
        self._was_heard = False

    def heard(self) -> None:
        """A message came."""
        self._was_heard = True

    def _look(self) -> bool:
        if not self._was_heard:
            self._claim.revoke(self._claim.pair.decode, f"said nothing about a request for {self._interval_s:g} s")
            return False
        self._was_heard = False
        return True
