"""Ways of attending in planned steps: whether each gives what the plain one gives, and how long it takes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from graftline.bench.gpu_rates import timed_s
from graftline.bench.gpu_steps import Steps
from graftline.kernels.attention_backend import FLASHINFER_HEAD_DIMS, choose_attention, flashinfer_trouble
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.attention_kind import AttentionBackend
from graftline.kernels.attention_torch import torch_attention

_PAGE_SIZE = 16
_TREE = (-1, 0, 0, 1, 1, 2, 3, 5)
_LARGEST_ERROR = 2e-2
CASES: tuple[tuple[str, tuple[tuple[int, int, Sequence[int] | None], ...]], ...] = (
    ("a prompt of 4096", ((0, 4096, None),)),
    ("a chunk of 512 at 3584", ((3584, 512, None),)),
    ("four chunks", ((0, 300, None), (17, 100, None), (1000, 512, None), (5, 1, None))),
    ("16 trees of 8 at 1000", tuple((1000 + index, 8, _TREE) for index in range(16))),
    ("trees and a chunk", ((33, 8, _TREE), (100, 200, None), (0, 8, _TREE), (15, 1, (-1,)))),
)
"""(name, (committed length, rows, parents) of every segment)."""
SHAPES = ((32, 8, 128), (9, 3, 64), (16, 2, 256))
# flashinfer compiled for one head size in 20 s on an H200's host.
_NEEDS_S = 30.0


def measure_attention(steps: Steps, device: str, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    """Notes every shape and way by name.

    Args:
        shapes: (query heads, KV heads, head size).
    """
    place = torch.device(device)
    steps.note("flashinfer", flashinfer_trouble() or "there")
    kinds = (
        (AttentionBackend.FLASHINFER, AttentionBackend.TRITON) if place.type == "cuda" else (AttentionBackend.TORCH,)
    )
    for shape in shapes:
        for kind in kinds:
            if kind is not AttentionBackend.FLASHINFER or shape[2] in FLASHINFER_HEAD_DIMS:
                steps.step(
                    f"attention, {kind.value}, {shape[0]} heads, {shape[1]} KV heads of {shape[2]}",
                    partial(compare, kind, place, *shape),
                    needs_s=_NEEDS_S if kind is AttentionBackend.FLASHINFER else 5.0,
                )


def compare(
    kind: AttentionBackend, device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> dict[str, dict[str, Any]]:
    """The largest error against plain torch operations, and milliseconds, of every case.

    Raises:
        RuntimeError: an error beyond what bfloat16 explains.
    """
    stored = torch.bfloat16 if device.type == "cuda" else torch.float32
    _, attention = choose_attention(kind, device, torch.bfloat16, head_dim)
    found = {}
    for name, segments in CASES:
        pages_each = [-(-(start + rows) // _PAGE_SIZE) for start, rows, _ in segments]
        pool = torch.randn(sum(pages_each) + 1, 3, _PAGE_SIZE, kv_heads, head_dim, device=device).to(stored)
        order = torch.randperm(sum(pages_each), generator=torch.Generator().manual_seed(1)).tolist()
        firsts = [sum(pages_each[:index]) for index in range(len(segments))]
        rows = [
            SegmentRows(start, count, order[first : first + pages], parents)
            for (start, count, parents), first, pages in zip(segments, firsts, pages_each, strict=True)
        ]
        batch = build_attention_batch(rows, _PAGE_SIZE, device)
        q = torch.randn(batch.num_rows, heads, head_dim, device=device).to(stored)
        k_pages, v_pages = pool[:, 0], pool[:, 2]
        expected = torch_attention(q, k_pages, v_pages, batch, head_dim**-0.5)
        actual = attention(q, k_pages, v_pages, batch, head_dim**-0.5)
        error = float((actual.float() - expected.float()).abs().max())
        if not error <= _LARGEST_ERROR:
            raise RuntimeError(f"{kind.value}: off by {error} in {name}")
        seconds = timed_s(device, partial(attention, q, k_pages, v_pages, batch, head_dim**-0.5), 5)
        found[name] = {"largest_error": error, "ms": 1e3 * seconds}
    return found
