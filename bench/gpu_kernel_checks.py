"""Every Triton kernel against its reference on the device: both types, odd sizes, outputs poisoned with NaN.

An item fails by raising; otherwise it gives `error`, ||out - reference|| / ||reference||, and `bound`, what it may be.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from graftline.bench.gpu_kernel_items import Item, captured, device, normal, poisoned_allocations, tree_round
from graftline.kernels.activation import silu_mul, silu_mul_reference
from graftline.kernels.attention import paged_attention, paged_attention_reference, tree_attention_reference
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.kv_compact import compact_kv, compact_kv_reference
from graftline.kernels.kv_write import write_kv, write_kv_reference
from graftline.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from graftline.kernels.qkv_placing import place_qkv, place_qkv_reference
from graftline.kernels.rope import rope_, rope_reference_
from graftline.kernels.sample import (
    SamplingRows,
    argmax,
    argmax_reference,
    build_sampling_rows,
    sample,
    sample_reference,
    top_k,
    top_k_reference,
)
from graftline.kernels.skinny_linear import (
    skinny_gate_up,
    skinny_gate_up_reference,
    skinny_linear,
    skinny_linear_reference,
)
from graftline.kernels.tree_batch import TreeBatch

_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
_TYPES = (torch.float32, torch.bfloat16)
_TREES: tuple[tuple[int, Sequence[int]], ...] = (
    (0, (-1, 0, 0, 1, 1)), (0, ()), (1, (-1,)), (63, (-1, 0, 1, 2, 3)), (64, (-1, 0, 0)), (700, (-1, 0, 1, 1, 0)),
    (1990, (-1, 0, 1, 2, 1)),
)  # fmt: skip
_SHAPES = ((9, 3, 64), (10, 2, 80), (12, 2, 96), (32, 8, 128), (8, 1, 128), (16, 2, 256), (16, 1, 64))
Described = TypeVar("Described", AttentionBatch, TreeBatch, SamplingRows)


def list_checks() -> list[Item]:
    """All of them."""
    items: list[Item] = []

    def add(name: str, run: Callable[[], dict[str, Any]]) -> None:
        items.append(Item(name, lambda warm_up: run()))

    for dtype in _TYPES:
        kind = "fp32" if dtype == torch.float32 else "bf16"
        for index, shape in enumerate(_SHAPES):
            heads = f"{shape[0]}/{shape[1]}x{shape[2]}"
            for page_size in sorted({(1, 3, 16, 64)[index % 4], 16}):
                for rows in (5, 24):
                    name = f"tree attention {kind} {heads} page {page_size} rows {rows}"
                    add(name, partial(_tree_attention, dtype, shape, page_size, rows))
            add(f"attention {kind} {heads}", partial(_attention, dtype, shape))
        for half, dim in ((64, 128), (32, 64), (16, 80), (32, 256)):
            for norm, is_tree in product((False, True), repeat=2):
                name = f"place_qkv {kind} dim {dim} rotated {2 * half} norm {norm} tree {is_tree}"
                add(name, partial(_place_qkv, dtype, half, dim, norm, is_tree))
        add(f"write_kv {kind}", partial(_write_kv, dtype))
        for size in (1, 576, 4096, 5000):
            add(f"norms {kind} {size}", partial(_norms, dtype, size))
            add(f"silu_mul {kind} {size}", partial(_silu_mul, dtype, size))
        add(f"rope {kind}", partial(_rope, dtype))
    for rows in (1, 4, 16, 17, 64):
        for inputs, outputs in ((64, 16), (576, 960), (1536, 576), (4096, 4096), (1000, 333)):
            add(f"skinny linear bf16 rows {rows} {inputs}->{outputs}", partial(_skinny, rows, inputs, outputs))
            add(f"skinny gate_up bf16 rows {rows} {inputs}->{outputs}", partial(_gate_up, rows, inputs, outputs))
    for count in (1, 1000, 32768, 49152, 151936):
        for rows in (1, 7, 200):
            add(f"argmax {rows}x{count}", partial(_argmax, rows, count))
            for k in (1, 4, 8, 20):
                if k <= count:
                    add(f"top_k {rows}x{count} k {k}", partial(_top_k, rows, count, k))
        add(f"sample {count}", partial(_sample, count))
    add("compact_kv", _compact)
    add("a captured round sees new lengths", _replayed_lengths)
    return items


def relative(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; infinite when anything is not finite."""
    wide, reference = out.double().cpu(), expected.double().cpu()
    if out.shape != expected.shape or not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - reference).norm() / reference.norm().clamp(min=1e-12))


def _found(dtype: torch.dtype, *pairs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"error": max(relative(out, expected) for out, expected in pairs), "bound": _BOUNDS[dtype]}


def _equal(*pairs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """For results that must be the very same."""
    differing = sum(int((out.cpu() != expected.cpu()).sum()) for out, expected in pairs)
    return {"error": float(differing), "bound": 0.0}


def _on_cpu(value: Described) -> Described:
    tensors = {f.name: x.cpu() for f in fields(value) if isinstance(x := getattr(value, f.name), Tensor)}
    changes: dict[str, Any] = {**tensors}
    return replace(value, **changes)


def _pool(pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return normal(pages, 3, page_size, kv_heads, dim, seed=1, dtype=dtype)


def _random_tree(rows: int) -> list[int]:
    draw = random.Random(rows)
    return [-1, *(draw.randint(0, row - 1) for row in range(1, rows))]


def _a_round(rows_each: int, page_size: int) -> tuple[TreeBatch, int]:
    trees = [tree if index % 2 else _random_tree(rows_each) for index, (_, tree) in enumerate(_TREES)]
    return tree_round([start for start, _ in _TREES], trees, rows_each, page_size, 2048)


def _poison_unseen(pool: Tensor, batch: TreeBatch) -> None:
    """NaN in slots that no row sees."""
    seen = torch.zeros(pool.shape[0] * batch.page_size, dtype=torch.bool)
    tables = batch.page_tables.long().cpu()
    offsets = torch.arange(tables.shape[1] * batch.page_size)
    visible = batch.visible.view(-1, batch.rows_each).tolist()
    for index, start in enumerate(batch.starts.tolist()):
        slots = [
            *range(start),
            *(start + j for j in range(batch.num_tail) if any(row >> j & 1 for row in visible[index])),
        ]
        at = offsets[torch.tensor(slots, dtype=torch.int64)]
        seen[tables[index, at // batch.page_size] * batch.page_size + at % batch.page_size] = True
    pool.transpose(1, 2)[~seen.view(-1, batch.page_size).to(pool.device)] = torch.nan


def _tree_attention(dtype: torch.dtype, shape: tuple[int, int, int], page_size: int, rows_each: int) -> dict[str, Any]:
    heads, kv_heads, dim = shape
    batch, pages = _a_round(rows_each, page_size)
    pool = _pool(pages, page_size, kv_heads, dim, dtype)
    _poison_unseen(pool, batch)
    q = normal(batch.num_rows, heads, dim, seed=2, dtype=dtype)
    with poisoned_allocations():
        out = paged_attention(q, pool[:, 0], pool[:, 2], batch, dim**-0.5)
    there = pool.cpu()
    expected = tree_attention_reference(q.float().cpu(), there[:, 0], there[:, 2], _on_cpu(batch), dim**-0.5)
    return _found(dtype, (out, expected))


def _segments(page_size: int) -> AttentionBatch:
    lengths = (0, 70, 700, 5, 1000)
    rows: tuple[tuple[int, Sequence[int] | None], ...] = (
        (200, None), (1, None), (5, (-1, 0, 0, 1, 1)), (24, _random_tree(24)), (3, None),
    )  # fmt: skip
    first, segments = 0, []
    for start, (count, parents) in zip(lengths, rows, strict=True):
        pages = range(first, first + -(-(start + count) // page_size))
        first = pages.stop
        segments.append(SegmentRows(start, count, pages, parents))
    return build_attention_batch(segments, page_size, device())


def _attention(dtype: torch.dtype, shape: tuple[int, int, int]) -> dict[str, Any]:
    heads, kv_heads, dim = shape
    batch = _segments(16)
    pool = _pool(200, 16, kv_heads, dim, dtype)
    q = normal(batch.num_rows, heads, dim, seed=2, dtype=dtype)
    with poisoned_allocations():
        out = paged_attention(q, pool[:, 0], pool[:, 2], batch, dim**-0.5)
    there = pool.cpu()
    expected = paged_attention_reference(q.float().cpu(), there[:, 0], there[:, 2], _on_cpu(batch), dim**-0.5)
    return _found(dtype, (out, expected))


def _place_qkv(dtype: torch.dtype, half: int, dim: int, has_norm: bool, is_tree: bool) -> dict[str, Any]:
    batch, pages = _a_round(5, 16) if is_tree else (_segments(16), 200)
    pool, angles = _pool(pages, 16, 2, dim, dtype), normal(2048, half, seed=3)
    tables = angles.cos(), angles.sin()
    qkv = normal(batch.num_rows, (7 + 4) * dim, seed=4, dtype=dtype)
    norms = [normal(dim, seed=seed, dtype=dtype) for seed in (5, 6)] if has_norm else [None, None]
    expected_pool = pool.clone()
    pages_of = expected_pool[:, 0], expected_pool[:, 2]
    expected = place_qkv_reference(qkv, *pages_of, batch, batch.positions, *tables, norms[0], norms[1], 1e-5)
    with poisoned_allocations():
        q = place_qkv(
            qkv, pool[:, 0], pool[:, 2], batch, batch.positions, *tables, q_norm=norms[0], k_norm=norms[1], eps=1e-5
        )
    return _found(dtype, (q, expected), (pool, expected_pool))


def _write_kv(dtype: torch.dtype) -> dict[str, Any]:
    pairs = []
    for page_size in (1, 3, 16):
        for batch, pages in (_a_round(5, page_size), (_segments(page_size), 2048)):
            pool = _pool(pages, page_size, 3, 64, dtype)
            expected = pool.clone()
            k, v = (normal(batch.num_rows, 3, 64, seed=seed, dtype=dtype) for seed in (3, 4))
            write_kv(k, v, pool[:, 0], pool[:, 2], batch)
            write_kv_reference(k, v, expected[:, 0], expected[:, 2], batch)
            pairs.append((pool, expected))
    return _equal(*pairs)


def _norms(dtype: torch.dtype, size: int) -> dict[str, Any]:
    x, residual, weight = (normal(5, size, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    with poisoned_allocations():
        normed, total = add_rms_norm(x, residual, weight[0].contiguous(), 1e-5)
        plain = rms_norm(x, weight[0].contiguous(), 1e-5)
    both = x + residual
    return _found(
        dtype,
        (total, both),
        (normed, rms_norm_reference(both, weight[0], 1e-5)),
        (plain, rms_norm_reference(x, weight[0], 1e-5)),
    )


def _silu_mul(dtype: torch.dtype, size: int) -> dict[str, Any]:
    gate_up = normal(5, 2 * size, dtype=dtype)
    with poisoned_allocations():
        return _found(dtype, (silu_mul(gate_up), silu_mul_reference(gate_up)))


def _rope(dtype: torch.dtype) -> dict[str, Any]:
    pairs = []
    for dim, half in ((64, 32), (128, 64), (80, 20), (256, 32)):
        angles, positions = normal(999, half), torch.tensor([0, 998, 17], dtype=torch.int32, device=device())
        qkv = normal(3, 5 * dim, seed=2, dtype=dtype)
        expected = qkv.clone()
        q, k = qkv[:, : 3 * dim].view(3, 3, dim), qkv[:, 3 * dim : 4 * dim].view(3, 1, dim)
        rope_(q, k, positions, angles.cos(), angles.sin())
        rope_reference_(expected[:, : 4 * dim].view(3, 4, dim), positions, angles.cos(), angles.sin())
        pairs.append((qkv, expected))
    return _found(dtype, *pairs)


def _skinny(rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    x, weight, bias = (
        normal(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(((rows, inputs), (outputs, inputs), (outputs,)))
    )
    with poisoned_allocations():
        plain, biased = skinny_linear(x, weight), skinny_linear(x, weight, bias)
    return _found(
        torch.bfloat16,
        (plain, skinny_linear_reference(x, weight, None)),
        (biased, skinny_linear_reference(x, weight, bias)),
    )


def _gate_up(rows: int, inputs: int, inter: int) -> dict[str, Any]:
    x, weight = normal(rows, inputs, dtype=torch.bfloat16), normal(2 * inter, inputs, seed=1, dtype=torch.bfloat16)
    with poisoned_allocations():
        out = skinny_gate_up(x, weight)
    return _found(torch.bfloat16, (out, skinny_gate_up_reference(x, weight)))


def _logits(rows: int, count: int) -> Tensor:
    """With ties, forbidden ids, and a row that has no distribution."""
    logits = 3 * normal(rows, count)
    logits[rows // 2] = logits[rows // 2].round()
    logits[0, : count // 2] = -torch.inf
    return logits


def _argmax(rows: int, count: int) -> dict[str, Any]:
    logits = _logits(rows, count)
    if rows > 2:
        logits[1, count - 1], logits[2] = torch.nan, -torch.inf
    with poisoned_allocations():
        out = argmax(logits)
        replay = captured(lambda: out.copy_(argmax(logits)))
        first = out.clone()
        out.zero_()
        replay()
    expected = argmax_reference(logits)
    return _equal((first, expected), (out, expected))


def _top_k(rows: int, count: int, k: int) -> dict[str, Any]:
    logits = _logits(rows, count)
    if count < 2 * k:
        logits = normal(rows, count)
    with poisoned_allocations():
        values, ids = top_k(logits, k)
    expected_values, expected_ids = top_k_reference(logits, k)
    if not torch.equal(ids, expected_ids):
        return _equal((ids, expected_ids))
    return _found(torch.float32, (values, expected_values))


def _sample(count: int) -> dict[str, Any]:
    """Draws equal the reference's, but for top-p where sums may round differently."""
    logits = 2 * normal(40, count, seed=3)
    logits[7] = logits[7].round()
    rows = build_sampling_rows(
        [0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 2.0, 1.0] * 5, [0, 0, 3, 1, 0, 40, 0, 5] * 5,
        [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 1.0] * 5, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0] * 5, range(40), device(),
    )  # fmt: skip
    positions = torch.arange(50, 90, device=device())
    with poisoned_allocations():
        out = sample(logits, rows, positions)
    expected = sample_reference(logits.cpu(), _on_cpu(rows), positions.cpu())
    exact = rows.top_p.cpu() == 1
    wrong = int((out.cpu() != expected)[exact].sum())
    return {"error": float(wrong), "bound": 0.0, "top_p_rows_that_differ": int((out.cpu() != expected)[~exact].sum())}


def _compact() -> dict[str, Any]:
    pool = torch.randint(0, 256, (40, 6, 4, 768), dtype=torch.uint8, device=device())
    tables = torch.randperm(40)[:36].view(3, 12).int().to(device())
    starts = torch.tensor([2, 17, 30], dtype=torch.int32, device=device())
    accepted = torch.tensor([[0, 2, 3, 6], [0, 1, -1, -1], [0, 5, -1, -1]], dtype=torch.int32, device=device())
    expected = pool.clone()
    compact_kv(pool, tables, starts, accepted)
    compact_kv_reference(expected, tables, starts, accepted)
    return _equal((pool, expected))


def _replayed_lengths() -> dict[str, Any]:
    """One graph, captured with padding alone, replayed with lengths that it has never seen."""
    batch, pages = tree_round([0] * 4, [()] * 4, 5, 16, 2048)
    other, _ = tree_round([1990, 3, 0, 640], [_random_tree(5), (-1, 0), (), (-1, 0, 0)], 5, 16, 2048)
    pool, q = _pool(pages, 16, 2, 64, torch.bfloat16), normal(20, 6, 64, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    replay = captured(lambda: out.copy_(paged_attention(q, pool[:, 0], pool[:, 2], batch, 0.125)))
    for name in ("positions", "row_slots", "visible", "starts", "page_tables"):
        getattr(batch, name).copy_(getattr(other, name))
    replay()
    there = pool.cpu()
    expected = tree_attention_reference(q.float().cpu(), there[:, 0], there[:, 2], _on_cpu(other), 0.125)
    return _found(torch.bfloat16, (out, expected))
