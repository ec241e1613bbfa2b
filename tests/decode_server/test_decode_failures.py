"""What the decode engine's failures mean to the caller: whether another worker is worth a try."""

import pytest

from graftline.decode_server import handoff
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
