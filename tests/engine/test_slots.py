"""Slot ids."""

import pytest

from graftline.engine.request import SlotId
from graftline.engine.slots import SlotPool


def test_the_lowest_free_slot_is_taken() -> None:
    slots = SlotPool(3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    assert slots.num_free == 0
    slots.give_back(SlotId(2))
    slots.give_back(SlotId(0))
    assert (slots.num_free, slots.take(), slots.take()) == (2, 0, 2)


def test_giving_back_twice_is_our_bug() -> None:
    slots = SlotPool(2)
    slot = slots.take()
    slots.give_back(slot)
    with pytest.raises(AssertionError, match="given back twice"):
        slots.give_back(slot)
    with pytest.raises(IndexError):
        SlotPool(0).take()
