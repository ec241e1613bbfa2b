"""`python stage_main.py`'s module: the process of a later stage under test, without any transfers.

`SLOW_STEP` in the environment makes one step take so many seconds longer: step number, colon, seconds. `SHARED_MEMORY`
lets stages write into each other's memory.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shared_peer_memory import SHARED_MEMORY, SharedPeerMemory

from graftline.engine import links_distributed
from graftline.engine.pipeline import StageCommand
from graftline.engine.plan import StepPlan
from graftline.engine.stage import Stage
from graftline.engine.stage_process import config_from_environment, run_stage
from graftline.engine.transfer_port import NoTransfer

PR_SET_PDEATHSIG = 1
# Found beside this file, and the package under test where this process found it.
_FOLDERS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
COMMAND = StageCommand("stage_main", {"PYTHONPATH": os.pathsep.join(_FOLDERS)})


def slow_down(step: int, seconds: float) -> None:
    """Lets one step of this process's stage take longer."""
    execute = Stage.execute

    def slowly(self: Stage, plan: StepPlan, *rest: Any) -> Any:
        if plan.step == step:
            time.sleep(seconds)
        return execute(self, plan, *rest)

    Stage.execute = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    if "SLOW_STEP" in os.environ:
        number, _, duration = os.environ["SLOW_STEP"].partition(":")
        slow_down(int(number), float(duration))
    if SHARED_MEMORY in os.environ:
        links_distributed.peer_memory_of = lambda device: SharedPeerMemory()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.exit(run_stage(config_from_environment(), lambda stage: NoTransfer()))
