"""`python -m graftline.worker.stage_main`: the process of a stage behind the first."""

import os
from typing import NoReturn

import msgspec

from graftline.engine.pipeline import StageCommand
from graftline.engine.stage_process import config_from_environment, run_stage
from graftline.worker.config import TransferConfig
from graftline.worker.early_stages import EarlyStage, orders_taken_by
from graftline.worker.process import die_with_parent, end_process, outlive_signals, set_up_logging
from graftline.worker.transfer import PortFactory

TRANSFER_CONFIG_VARIABLE = "GRAFTLINE_TRANSFER_CONFIG"


def stage_command(transfer: TransferConfig, early: tuple[EarlyStage, ...] = ()) -> StageCommand:
    """How stage 0 starts this module.

    Args:
        early: processes that wait for their orders already, one a later stage, or none.
    """
    variables = {TRANSFER_CONFIG_VARIABLE: msgspec.json.encode(transfer).decode()}
    return StageCommand(__name__, variables, orders_taken_by(early) if early else None)


def transfer_config_from_environment() -> TransferConfig:
    """The worker's transfer settings as stage 0 handed them down."""
    return msgspec.json.decode(os.environ[TRANSFER_CONFIG_VARIABLE], type=TransferConfig)


def main() -> NoReturn:
    """Runs the stage."""
    if os.environ.get("GRAFTLINE_SPAWNED"):
        die_with_parent(last_words_s=0)
        outlive_signals(None)
    set_up_logging(f"stage {os.environ.get('RANK', '?')}")
    status = run_stage(config_from_environment(), PortFactory(transfer_config_from_environment()))
    end_process(status)


if __name__ == "__main__":
    main()
