"""What the decode engine's failures mean to the caller: whether another worker is worth a try."""

from collections import deque

import pytest

from graftline.decode_server import handoff
from graftline.decode_server.attempt import Attempt
from graftline.engine.service_api import DecodeFailed, DecodeFailure
from graftline.errors import GraftlineError, InternalError, OutOfCapacityError, PeerUnavailableError


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (DecodeFailure.OUT_OF_CAPACITY, OutOfCapacityError),
        (DecodeFailure.ENGINE_LOST, PeerUnavailableError),
        (DecodeFailure.INTERNAL, InternalError),
    ],
)
def test_the_code_decides_the_error(code: DecodeFailure, expected: type[GraftlineError]) -> None:
    """CASES R09: typed, with its message."""
    running = handoff.State(leg=handoff.Leg.CLOSED, pages=handoff.Pages.RUNNING, has_first_token=True)
    state, actions = handoff.step(running, DecodeFailed("why", code))
    assert state.ended
    (told,) = (action.outcome for action in actions if isinstance(action, handoff.Tell))
    assert isinstance(told, handoff.Failed)
    assert type(told.error) is expected
    assert str(told.error) == "why"


def test_a_step_that_raises_does_not_keep_what_comes_after_it() -> None:
    """Every later message of the attempt would wait behind it for ever, and the caller with them."""

    class Stumbling(Attempt):
        def __init__(self) -> None:
            self._posted = deque()
            self._state = handoff.State(wants_pages=True)
            self.seen: list[object] = []

        def _step(self, message: handoff.Message) -> None:
            self.seen.append(message)
            if len(self.seen) == 1:
                raise RuntimeError("a trace broke")

    attempt = Stumbling()
    first, second = handoff.DrainTimedOut(), handoff.StreamLost("gone")
    with pytest.raises(RuntimeError, match="a trace broke"):
        attempt.post(first)
    attempt.post(second)
    assert attempt.seen == [first, second]
