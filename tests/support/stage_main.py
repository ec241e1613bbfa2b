"""`python stage_main.py`'s module: the process of a later stage under test, without any transfers."""

import ctypes
import signal
import sys

from graftline.engine.stage_process import config_from_environment, run_stage
from graftline.engine.transfer_port import NoTransfer

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.exit(run_stage(config_from_environment(), lambda stage: NoTransfer()))
