"""Programmatic dependent launch: a kernel is made ready while the one before it still runs, and waits for it inside.

The rule that makes this safe: before `wait_for_earlier` a kernel touches nothing but registers and the L2 cache
(`fetch_lines`, `fetch_spans`: hints that cannot be stale), and every program of every kernel launched with
`launch_options` calls it. A kernel that has waited therefore sees all that any earlier one wrote, and kernels launched
the plain way wait for everything as ever. It is off unless `GRAFTLINE_PDL=1` and the device is
sm_90 or newer: on an H200 whole layers were slower with it (docs/decisions.md).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_OFF: dict[str, bool] = {"OVERLAP": False}
_ON: dict[str, bool] = {"OVERLAP": True, "launch_pdl": True}
_forced: ContextVar[bool | None] = ContextVar("_forced", default=None)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Lets the next kernel be made ready as soon as all programs of this one run: the first thing a kernel does."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Returns when all that earlier kernels wrote can be read, and all that they read can be overwritten."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_lines(addresses):
    """Asks for the L2 lines of a block of pointers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def fetch_spans(addresses, num_bytes):
    """Asks for `num_bytes` (a block of int32, multiples of 16) from every pointer on (multiples of 16) into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [addresses.to(tl.int64), num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def launch_options(x: Tensor) -> dict[str, bool]:
    """Arguments of a launch on x's device: whether it overlaps the kernel before it."""
    if not x.is_cuda:
        return _OFF
    forced = _forced.get()
    on = _is_on(x.device.index) if forced is None else forced
    return _ON if on else _OFF


@contextmanager
def forced_overlap(on: bool) -> Iterator[None]:
    """Launches inside overlap or do not, whatever the environment says: to compare both."""
    token = _forced.set(on)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def _is_on(device_index: int) -> bool:
    major, _ = torch.cuda.get_device_capability(device_index)
    return major >= 9 and os.environ.get("GRAFTLINE_PDL", "0") == "1"
