"""The clock that stands still with its process."""

from graftline.engine.awake_clock import LONGEST_TURN_S, AwakeClock


class Hands:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_turns_add_up() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    for _ in range(6):
        hands.now_s += 0.5
        clock.tick()
    assert clock.now_s == 3.0


def test_a_standstill_is_one_turn() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    hands.now_s += 3600
    assert clock.now_s == 0.0
    clock.tick()
    assert clock.now_s == LONGEST_TURN_S
