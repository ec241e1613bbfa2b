"""What a device can do at best, measured: the figures that others are held against. Seconds, bytes, operations."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_REPEATS = 10


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_s(device: torch.device, run: Callable[[], object], repeats: int = _REPEATS, warm_ups: int = 2) -> float:
    """Median seconds of a call until the device is done."""
    seconds = []
    for _ in range(warm_ups + repeats):
        wait(device)
        started = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[warm_ups:])


def as_graph(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """The same as one CUDA graph, so that launches cost nothing; on CPU itself."""
    if device.type != "cuda":
        return run
    for _ in range(2):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2 << 30) -> float:
    """Bytes read plus bytes written a second, copying one large block on the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * num_bytes / timed_s(device, lambda: into.copy_(source))


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations a second of one large matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / timed_s(device, lambda: a @ b)


def profile_table(device: torch.device, run: Callable[[], object], top: int = 15) -> list[dict[str, Any]]:
    """The kernels (on CPU: operations) that a call spends its time in, the most expensive first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        wait(device)
    on_device = device.type == "cuda"

    def own_us(event: Any) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=own_us, reverse=True)
    total = sum(map(own_us, events)) or 1.0
    return [
        {"name": event.key[:120], "calls": event.count, "us": round(own_us(event), 1), "share": own_us(event) / total}
        for event in events[:top]
        if own_us(event) > 0
    ]
