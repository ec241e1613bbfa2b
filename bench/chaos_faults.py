"""Which faults hit which process, and when: drawn from a seed, each kind as often as the others."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random


class FaultKind(Enum):
    """What happens to a process."""

    KILL = "kill"
    """SIGKILL of the process and its stages at once, as when a machine goes down."""
    KILL_FIRST = "kill-first-stage"
    """SIGKILL of the first stage's process alone; the others have to notice."""
    KILL_LATER = "kill-later-stage"
    """SIGKILL of a stage behind the first; the worker has to notice and end."""
    FREEZE = "freeze"
    """SIGSTOP of the first stage's process, SIGCONT later."""
    FREEZE_ALL = "freeze-all"
    """SIGSTOP of all of a worker's processes, SIGCONT later."""
    FREEZE_LATER = "freeze-later-stage"
    """SIGSTOP of a stage behind the first, for good: the worker has to notice, end it and end."""
    TERMINATE = "terminate"
    """SIGTERM, as in a rolling restart."""


ALL_KINDS = tuple(FaultKind)


class Lane(Enum):
    """At most one process of a lane is in trouble at a time: the others of its kind carry the load."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


_FREEZES = {FaultKind.FREEZE, FaultKind.FREEZE_ALL}
_OF_ONE_PROCESS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.TERMINATE)
_OF_STAGES = (FaultKind.KILL_FIRST, FaultKind.KILL_LATER, FaultKind.FREEZE_ALL, FaultKind.FREEZE_LATER)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come.

    Attributes:
        target: index among the processes of its lane.
        pause_s: from the last fault's end to this one.
        freeze_s: how long a freeze lasts; longer than hangs take to be noticed, or shorter.
    """

    kind: FaultKind
    target: int
    pause_s: float
    freeze_s: float = 0.0


def schedule(
    lane: Lane, seed: int, num_targets: int, num_stages: int, pause_s: float, wanted: Collection[FaultKind] = ALL_KINDS
) -> Iterator[Fault]:
    """Faults of a lane without end (none when none is wanted): a shuffled deck of all kinds, again and again.

    Args:
        pause_s: mean of the pauses.
        wanted: no other kinds.
    """
    draw = Random(f"faults/{lane.value}/{seed}")
    possible: Sequence[FaultKind] = _OF_ONE_PROCESS if num_stages == 1 else (*_OF_ONE_PROCESS, *_OF_STAGES)
    kinds = [kind for kind in possible if kind in wanted]
    while kinds:
        for kind in draw.sample(kinds, len(kinds)):
            freeze_s = draw.choice((0.5, 1.5, 4.0, 6.0)) if kind in _FREEZES else 0.0
            yield Fault(kind, draw.randrange(num_targets), pause_s * draw.uniform(0.3, 1.7), freeze_s)
