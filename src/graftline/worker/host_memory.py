"""Whether this machine can hold what a worker on its CPU is told to take: found out before it is taken."""

import os
from pathlib import Path

from graftline.engine.config import EngineConfig
from graftline.engine.draft_choice import chosen_head
from graftline.engine.memory_plan import plan_memory
from graftline.engine.models.checkpoint import read_model_config
from graftline.errors import InvalidRequestError

# Where a container's limit stands: cgroup v2 and v1. Absent, or a huge number or "max", without a limit.
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_GIB = 1 << 30


def host_bytes(limit_files: tuple[Path, ...] = _LIMIT_FILES) -> int:
    """Bytes that processes here may take together: the machine's memory, or the container's limit below it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in limit_files:
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return min(found)


def check_room(config: EngineConfig, stage: int | None, available_bytes: int | None = None) -> None:
    """Compares weights and pools with this machine's memory.

    Args:
        stage: the only one that runs here; None: all of them do.
        available_bytes: by default what this machine has.

    Raises:
        InvalidRequestError: they cannot fit, whatever else runs here.
    """
    model = read_model_config(Path(config.model))
    stages = plan_memory(config, model, chosen_head(config, model)).stages
    here = stages if stage is None else stages[stage : stage + 1]
    needed = sum(part.weight_bytes + part.draft_weight_bytes + part.pool_bytes for part in here)
    available = host_bytes() if available_bytes is None else available_bytes
    if needed > available:
        raise InvalidRequestError(
            "pages",
            f"{config.num_pages} pages of {config.page_size} tokens with the weights take {needed / _GIB:.1f} GiB; "
            f"this machine or container has {available / _GIB:.1f} GiB",
        )
