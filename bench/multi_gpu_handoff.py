"""Handoffs between two GPUs: plain copies, the transfer engine's own calls, and real prompts of 8B shapes."""

from collections.abc import Sequence
from pathlib import Path

from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_transfer import PromptSizes, measure_device_copies, measure_writes
from graftline.bench.gpu_transfer import measure_handoffs as measure_prompts
from graftline.engine.models.checkpoint import read_model_config

GPU_PROMPTS = (1024, 16384, 65536)
CPU_PROMPTS = (64, 128)
# The KV of those prompts at 8B shapes is 128 MiB, 2 GiB and 8 GiB.
_GPU_SIZES_MIB = (1, 4, 16, 64, 128, 256, 1024, 2048, 8192)
_CPU_SIZES_MIB = (1, 2)
_CHUNK_TOKENS = 2048


def measure_handoffs(steps: Steps, model: Path, devices: Sequence[str], prompts: Sequence[int]) -> None:
    """Everything by size."""
    is_cpu = devices[0] == "cpu"
    sizes = _CPU_SIZES_MIB if is_cpu else _GPU_SIZES_MIB
    measure_device_copies(steps, devices, sizes)
    steps.step("writes", lambda: measure_writes(steps, devices, sizes))
    steps.note("layers", read_model_config(model).num_layers)
    wanted = PromptSizes(prompts, 32 if is_cpu else _CHUNK_TOKENS, 1 if is_cpu else 2)
    steps.step("prompts", lambda: measure_prompts(steps, model, devices, wanted), needs_s=20.0)
