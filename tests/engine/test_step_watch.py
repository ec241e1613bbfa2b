"""When a step under way counts as lost or hung, and when it is only long."""

from dataclasses import dataclass

from graftline.engine.plan import StageAlive
from graftline.engine.step_watch import StepWatch

LOOK_S = 0.5


@dataclass
class World:
    """Two stages as a loop sees them, one look after another: patience of 2 s with lost steps, 5 s with hung ones."""

    sequence: int = 0
    steps: tuple[int, int] = (7, 7)
    cpu_s: float = 1.0

    def __post_init__(self) -> None:
        self.watch = StepWatch(LOOK_S, lost_after_s=2.0, hung_after_s=5.0)

    def look(self, oldest: int | None, *, working: bool = True, answers: bool = True) -> str | None:
        self.sequence += answers
        stages = [
            StageAlive(0, self.sequence, 0.0, self.steps[0]),
            StageAlive(1, self.sequence, 0.0, self.steps[1], working=working, cpu_s=self.cpu_s),
        ]
        return self.watch.look(oldest, stages)

    def looks_until_trouble(self, *, working: bool, cpu_s: float = 0.0) -> tuple[int, str]:
        for count in range(1, 1000):
            self.cpu_s += cpu_s
            if (trouble := self.look(3, working=working)) is not None:
                return count, trouble
        raise AssertionError("never")


def test_a_step_that_nobody_works_on_was_lost() -> None:
    looks, trouble = World().looks_until_trouble(working=False)
    assert trouble == "step 3 was lost: no stage is at work on it"
    assert looks * LOOK_S <= 3.0


def test_a_step_without_progress_is_hung() -> None:
    looks, trouble = World().looks_until_trouble(working=True)
    assert trouble == "step 3 makes no progress for 5.5 s"
    assert looks == 12


def test_a_busy_step_may_take_ten_times_as_long() -> None:
    looks, trouble = World().looks_until_trouble(working=True, cpu_s=0.4)
    assert trouble == "step 3 is under way for 50 s"
    assert looks * LOOK_S > 50


def test_steps_that_end_and_idle_pipelines_are_well() -> None:
    world = World()
    for step in range(40):
        assert world.look(step, working=False) is None
    for _ in range(40):
        assert world.look(None, working=False) is None
    for count in range(40):  # step 50 waits behind others that the stages finish
        world.steps = (7 + count, 7 + count)
        assert world.look(50, working=False) is None


def test_stages_that_do_not_answer_prove_nothing() -> None:
    """Their silence is judged elsewhere; what they said before they fell silent says nothing of a newer step."""
    world = World()
    world.look(3, working=False)
    assert [world.look(3, working=False, answers=False) for _ in range(10)] == [None] * 10
