"""Orders that have queued up for a stage's port reach it together, in order, and nothing overtakes them."""

from graftline.engine.plan import CancelSends, Control, SendOrder, SentPool
from graftline.engine.stage_worker import _MOST_SENDS, _Orders


def order(number: int) -> SendOrder:
    return SendOrder(number, "owner", "peer", 0, SentPool.TARGET, [(0, 0, 1)])


def test_orders_up_to_another_message_are_taken_together() -> None:
    orders = _Orders()
    messages: list[Control] = [order(1), order(2), CancelSends("owner"), order(3), order(4)]
    for message in messages:
        orders.put(message)
    first = orders.take()
    assert isinstance(first, SendOrder)
    assert orders.take_sends(first) == messages[:2]
    assert orders.take() == messages[2]
    second = orders.take()
    assert isinstance(second, SendOrder)
    assert orders.take_sends(second) == messages[3:]


def test_a_bounded_number_is_taken() -> None:
    orders = _Orders()
    for number in range(_MOST_SENDS + 3):
        orders.put(order(number))
    counts = []
    for _ in range(2):
        first = orders.take()
        assert isinstance(first, SendOrder)
        counts.append(len(orders.take_sends(first)))
    assert counts == [_MOST_SENDS, 3]
