"""Contract 7: pages that somebody may still write to stay out of use until that is over."""

from dataclasses import dataclass

from graftline.engine.pages import PageAllocator
from graftline.engine.quarantine import Quarantine
from graftline.engine.slots import SlotPool


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_pages_return_when_their_writer_is_gone_or_time_is_up() -> None:
    clock, allocator = Clock(), PageAllocator(8)
    quarantine = Quarantine(allocator, SlotPool(2), hold_s=60.0, clock=clock)
    first, second, third = allocator.allocate(2), allocator.allocate(3), allocator.allocate(1)
    quarantine.add("a", first)
    clock.now += 30
    quarantine.add("b", second)
    quarantine.add("a", third)
    assert allocator.gauges().quarantined == 6
    assert allocator.num_available == 2

    quarantine.forget_peer("c")
    quarantine.expire()
    assert allocator.gauges().quarantined == 6

    clock.now += 29.5
    quarantine.expire()
    assert allocator.gauges().quarantined == 6, "not before the time"
    clock.now += 0.5
    quarantine.expire()
    assert allocator.gauges().quarantined == 4, "the first entry's time is up, the others' is not"

    quarantine.forget_peer("a")
    assert allocator.gauges().quarantined == 3
    quarantine.forget_peer("a")
    quarantine.forget_peer("b")
    assert allocator.gauges().free == 8
    allocator.check_invariants()


def test_a_slot_with_state_returns_with_its_pages() -> None:
    allocator, slots = PageAllocator(8), SlotPool(2)
    quarantine = Quarantine(allocator, slots, hold_s=60.0, clock=Clock())
    quarantine.add("a", allocator.allocate(1), slots.take())
    quarantine.add("b", allocator.allocate(1))
    assert slots.num_free == 1
    quarantine.forget_peer("b")
    assert slots.num_free == 1, "the other entry held no slot"
    quarantine.forget_peer("a")
    assert slots.num_free == 2
