"""Compares what arrived for requests with what their prefills say they sent, before their first rounds.

Every stage digests its part of a request's pages and state; a combination of all of them is what was sent.
"""

import itertools
from dataclasses import dataclass

from graftline.engine.decode_request import DecodeRequest
from graftline.engine.plan import DigestDone, DigestUnits, SentPool
from graftline.engine.step_pipeline import StepPipeline


@dataclass(slots=True)
class _Check:
    """One request's.

    Attributes:
        num_open: stages that have not answered.
        missing: what they still have to bring, combined with the digest that was sent.
    """

    request: DecodeRequest
    num_open: int
    missing: int


class ArrivalChecks:
    """The checks under way.

    Args:
        has_state: recurrent state arrives too.
    """

    def __init__(self, pipeline: StepPipeline, num_stages: int, *, has_state: bool) -> None:
        self._pipeline = pipeline
        self._num_stages = num_stages
        self._has_state = has_state
        self._numbers = itertools.count()
        self._open: dict[int, _Check] = {}

    def begin(self, request: DecodeRequest, kv_digest: bytes) -> None:
        """Asks every stage for its part of what was sent with this digest."""
        pages = [int(page) for page in request.pages]
        units = [(SentPool.TARGET, pages), (SentPool.DRAFT, pages)]
        if self._has_state:
            units.append((SentPool.STATE, [int(request.slot)]))
        number = next(self._numbers)
        self._open[number] = _Check(request, self._num_stages, int.from_bytes(kv_digest))
        self._pipeline.tell(DigestUnits(number, units))

    def take(self, done: DigestDone) -> tuple[DecodeRequest, bool] | None:
        """A stage answered: the request and whether all of it is right, or None while other stages have to answer."""
        check = self._open[done.check]
        check.num_open -= 1
        check.missing ^= int.from_bytes(done.digest)
        if check.num_open:
            return None
        del self._open[done.check]
        return check.request, check.missing == 0
