"""Which GPU every stage gets, and how much of it: from what a user says to device names and bytes."""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graftline.engine.config import EngineConfig
from graftline.engine.split_measure import measured_split
from graftline.errors import InvalidRequestError

AUTO = "auto"
CPU = "cpu"
_GPU = re.compile(r"cuda:\d+")
_MIB = 1 << 20
DEFAULT_FRACTION = 0.9
# What a process takes of its GPU besides weights, pools and activations: driver context, libraries' workspaces, graphs,
# rings between stages.
PROCESS_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU, as the driver sees it."""

    total_bytes: int
    free_bytes: int


def num_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count()


def stage_devices(text: str, num_stages: int, gpus: Callable[[], int] = num_gpus) -> tuple[str, ...]:
    """Devices of a worker's stages.

    Args:
        text: "cpu"; "cuda": a GPU for every stage while they last, then from the first one again; "auto": that, or the
            CPU where there is no GPU; "cuda:N" for all stages; or a name for every stage, comma-separated.

    Raises:
        InvalidRequestError: another text, or GPUs that are not there.
    """
    if text in (CPU, AUTO, "cuda"):
        count = 0 if text == CPU else gpus()
        if text == "cuda" and count == 0:
            raise InvalidRequestError("devices", "cuda: torch sees no GPU")
        return tuple(f"cuda:{stage % count}" for stage in range(num_stages)) if count else (CPU,)
    names = tuple(text.split(","))
    if any(not _GPU.fullmatch(name) for name in names):
        raise InvalidRequestError("devices", f"{text!r} is not auto, cpu, cuda or a list of cuda:N")
    if len(names) not in (1, num_stages):
        raise InvalidRequestError("devices", f"{text!r} names {len(names)} devices for {num_stages} stages")
    missing = [name for name in names if int(name.removeprefix("cuda:")) >= gpus()]
    if missing:
        raise InvalidRequestError("devices", f"{', '.join(missing)}: torch sees {gpus()} GPUs")
    return names * num_stages if len(names) == 1 else names


def placed_workers(text: str, stages: Sequence[int], gpus: Callable[[], int] = num_gpus) -> list[str]:
    """Devices of several workers of one host, as text for each: "auto" and "cuda" hand the GPUs out one after another
    over all of them.

    Args:
        stages: stages of every worker.
    """
    if text not in (AUTO, "cuda") or not gpus():
        return [text] * len(stages)
    names = iter(stage_devices("cuda", sum(stages), gpus))
    return [",".join(next(names) for _ in range(count)) for count in stages]


def shared_fractions(devices: Sequence[str]) -> list[float]:
    """What every worker of one host may take of the GPUs it uses, when each gets as much for a stage as the others.

    Args:
        devices: of every worker, comma-separated, a name for every stage.
    """
    users = Counter(name for worker in devices for name in worker.split(","))
    return [
        min(DEFAULT_FRACTION * count / users[name] for name, count in Counter(worker.split(",")).items())
        for worker in devices
    ]


def stage_budgets(
    devices: Sequence[str],
    taken_bytes: Sequence[int],
    fraction: float,
    memory_of: Callable[[str], DeviceMemory],
) -> list[int]:
    """Bytes for the pools of every stage on GPUs.

    Args:
        devices: of every stage.
        taken_bytes: what every stage needs besides pools and `PROCESS_BYTES`.
        fraction: of a GPU, that the stages on it may take together.

    Raises:
        InvalidRequestError: a stage has no room for pools.
    """
    sharing = Counter(devices)
    budgets = []
    for stage, (device, taken) in enumerate(zip(devices, taken_bytes, strict=True)):
        memory = memory_of(device)
        room = min(fraction * memory.total_bytes, memory.free_bytes) / sharing[device]
        budget = int(room) - taken - PROCESS_BYTES
        if budget <= 0:
            raise InvalidRequestError(
                "memory_fraction",
                f"{fraction:g} of {device} leaves stage {stage} {room / _MIB:.0f} MiB; weights and a process take "
                f"{(taken + PROCESS_BYTES) / _MIB:.0f}",
            )
        budgets.append(budget)
    return budgets


def device_memory(device: str) -> DeviceMemory:
    """What the driver says of a GPU. Asks the management library where it is there: asking CUDA makes a context, which
    takes memory on a GPU that may be another stage's.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(int(info.total), int(info.free))
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that stages are placed on.

    Attributes:
        num_gpus: how many GPUs it has.
        memory_of: memory of a GPU by name.
        measures: stages may be built and timed here before the real ones.
        measure_split: layers of every stage by times.
    """

    num_gpus: Callable[[], int] = num_gpus
    memory_of: Callable[[str], DeviceMemory] = device_memory
    measures: bool = True
    measure_split: Callable[[EngineConfig], tuple[int, ...]] = measured_split
