"""The line of those that wait for room."""

from collections.abc import Callable
from random import Random

from graftline.engine.waiting_line import MAX_OVERTAKING, WaitingLine


def up_to(room: int) -> Callable[[int], bool]:
    return lambda item: item <= room


def line_of(*items: int) -> WaitingLine[int]:
    line = WaitingLine[int]()
    for item in items:
        line.append(item)
    return line


def test_who_fits_is_served_in_order_of_arrival() -> None:
    line = line_of(3, 1, 2)
    assert [line.take(up_to(5)) for _ in range(4)] == [3, 1, 2, None]


def test_who_fits_may_overtake_a_head_that_does_not() -> None:
    line = line_of(9, 8, 2, 3)
    assert [line.take(up_to(5)) for _ in range(3)] == [2, 3, None]
    assert list(line) == [9, 8]


def test_a_head_is_overtaken_a_bounded_number_of_times() -> None:
    """However many small ones keep coming, the large one gets its turn; the next head has a patience of its own."""
    line, overtaken = line_of(9), 0
    for _ in range(10 * MAX_OVERTAKING):
        line.append(1)
        overtaken += line.take(up_to(5)) is not None
    assert overtaken == MAX_OVERTAKING
    assert line.take(up_to(9)) == 9
    assert line.take(up_to(5)) == 1
    line = line_of(9, 8, 1)
    assert line.take(up_to(5)) == 1
    line.remove(9)
    for _ in range(MAX_OVERTAKING):
        line.append(1)
        assert line.take(up_to(5)) == 1


def test_those_whose_turn_cannot_come_are_passed_over() -> None:
    """And no patience of the head's is used up by that: nobody had to wait for them."""
    line = line_of(21, 22, 9, 1)
    assert line.take(up_to(5), lambda item: item < 20) == 1
    assert list(line) == [21, 22, 9]
    assert line.take(up_to(5), lambda item: item < 20) is None
    assert line.take(up_to(9), lambda item: item < 20) == 9
    assert line.take(up_to(99), lambda item: item < 20) is None
    for _ in range(3 * MAX_OVERTAKING):
        line.append(1)
        assert line.take(up_to(5), lambda item: item < 20) == 1
    assert line.take(up_to(99)) == 21


def test_looks_are_bounded() -> None:
    asked: list[int] = []

    def fits(item: int) -> bool:
        asked.append(item)
        return False

    assert line_of(*range(100)).take(fits) is None
    assert len(asked) < 20


def test_nobody_is_lost() -> None:
    draw, line, inside = Random(7), WaitingLine[int](), list[int]()
    for number in range(2000):
        match draw.randrange(3):
            case 0:
                line.append(number)
                inside.append(number)
            case 1 if inside:
                gone = draw.choice(inside)
                line.remove(gone)
                inside.remove(gone)
            case _:
                taken = line.take(lambda item: draw.random() < 0.3)
                if taken is not None:
                    inside.remove(taken)
        assert list(line) == inside
        assert len(line) == len(inside)
