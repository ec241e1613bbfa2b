"""Times of the kernels inside CUDA graphs: bytes that must be read, over seconds, against a plain copy.

Every figure walks through more memory than the L2 cache holds. Besides what the engine would choose, other tilings and
cuBLAS are timed, so that the choice can follow the table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graftline.bench.gpu_kernel_items import L2_BYTES, Item, device, normal, seconds_each, tree_round
from graftline.bench.gpu_rates import copy_bytes_per_s
from graftline.kernels.activation import silu_mul
from graftline.kernels.norm import add_rms_norm, rms_norm
from graftline.kernels.qkv_placing import place_qkv
from graftline.kernels.sample import argmax, build_sampling_rows, sample, top_k
from graftline.kernels.skinny_linear import LinearBackend, skinny_gate_up
from graftline.kernels.skinny_linear_triton import Streaming, choose_streaming, skinny_linear
from graftline.kernels.skinny_linear_triton import skinny_gate_up as streamed_gate_up
from graftline.kernels.tree_attention_triton import Tiling, choose_tiling, tree_attention
from graftline.kernels.tree_walk import tree_rows, walk_trees

_BF16 = torch.bfloat16
# (inputs, outputs) of an 8B model and of SmolLM2-135M, the vocabulary last; `gate_up` shapes are timed with silu_mul.
_SHAPES = {
    "8B": ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128256)),
    "135M": ((576, 960), (576, 576), (1536, 576), (576, 49152)),
}
_GATE_UP = {"8B": (4096, 14336), "135M": (576, 1536)}
_CONTEXTS = (
    (1, 1024), (1, 8192), (1, 65536), (4, 8192), (16, 1024), (16, 8192), (16, 16384), (32, 16384),
    (64, 1024), (64, 8192),
)  # fmt: skip
_FEW_CONTEXTS = ((1, 1024), (16, 8192), (64, 1024))
_FEW_ROWS = (
    Streaming(16, 256, 4, 6, 1), Streaming(32, 256, 4, 5, 1), Streaming(32, 128, 4, 8, 1), Streaming(64, 128, 4, 6, 1),
    Streaming(16, 512, 4, 4, 1), Streaming(64, 256, 8, 4, 1), Streaming(32, 256, 4, 5, 2), Streaming(16, 64, 4, 8, 1),
)  # fmt: skip
_MANY_ROWS = (
    Streaming(32, 128, 4, 4, 1), Streaming(64, 128, 4, 4, 1), Streaming(64, 128, 4, 4, 2), Streaming(64, 128, 4, 4, 4),
    Streaming(128, 64, 8, 5, 1), Streaming(128, 64, 8, 5, 4), Streaming(64, 64, 4, 6, 1),
)  # fmt: skip


def list_timings() -> list[Item]:
    """All of them, the most wanted first."""
    items = [Item("copy", _copy)]
    sizes: tuple[tuple[int, int], ...]
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 128), (9, 3, 64)):
        sizes = _CONTEXTS if heads == 32 else _FEW_CONTEXTS
        for batch, context in sizes:
            for rows in (1, 8) if heads == 32 else (4,):
                name = f"attention {heads}/{kv_heads}x{dim} batch {batch} context {context} rows {rows}"
                items.append(Item(name, partial(_attention, (heads, kv_heads, dim), batch, context, rows)))
    for model, shapes in _SHAPES.items():
        for rows in (1, 4, 16, 32, 64):
            for inputs, outputs in shapes:
                name = f"linear {model} rows {rows} {inputs}->{outputs}"
                items.append(Item(name, partial(_linear, rows, inputs, outputs)))
            inputs, inter = _GATE_UP[model]
            items.append(Item(f"gate_up {model} rows {rows} {inputs}->{inter}", partial(_gate_up, rows, inputs, inter)))
    for rows in (1, 16, 64, 256):
        items.append(Item(f"elementwise rows {rows}", partial(_elementwise, rows)))
        counts = (16384, 49152, 128256, 151936)
        items += [Item(f"choices rows {rows} of {count}", partial(_choices, rows, count)) for count in counts]
    return items + [Item(f"trees {trees}", partial(_trees, trees)) for trees in (1, 16, 64)]


def _copy(warm_up: bool) -> dict[str, Any]:
    return {} if warm_up else {"copy_gb_per_s": copy_bytes_per_s(device()) / 1e9}


def _attention(shape: tuple[int, int, int], batch: int, context: int, rows: int, warm_up: bool) -> dict[str, Any]:
    """A pool of several layers, a page's layers lying together as the engine has them; a call a layer."""
    heads, kv_heads, dim = shape
    layer_bytes = batch * context * 2 * kv_heads * dim * 2
    layers = 1 if warm_up else max(2, min(32, -(-4 * L2_BYTES // layer_bytes)))
    room = 64
    trees = [[-1, *range(rows - 1)]] * batch
    round_of, pages = tree_round([context] * batch, trees, rows, 16, context + room)
    pool = torch.zeros(pages, layers, 2, 16, kv_heads, dim, dtype=_BF16, device=device()).normal_()
    q = normal(batch * rows, heads, dim, dtype=_BF16)
    pairs = rows * heads // kv_heads
    max_slots = round_of.page_tables.shape[1] * 16
    processors = torch.cuda.get_device_properties(device()).multi_processor_count if q.is_cuda else 132
    chosen = choose_tiling(batch, kv_heads, pairs, dim, 2, max_slots, processors)

    def measure(tiling: Tiling) -> float:
        calls = [
            partial(tree_attention, q, pool[:, layer, 0], pool[:, layer, 1], round_of, dim**-0.5, tiling)
            for layer in range(layers)
        ]
        return seconds_each(calls, 1 if warm_up else 5)

    found: dict[str, Any] = {"bytes": layer_bytes, "seconds": measure(chosen), "tiling": list(chosen)}
    others = {
        "double splits": chosen._replace(num_splits=min(128, 2 * chosen.num_splits), min_span=chosen.min_span // 2),
        "half splits": chosen._replace(num_splits=max(1, chosen.num_splits // 2)),
        "3 stages": chosen._replace(num_stages=3),
        "3 stages, half splits": chosen._replace(num_stages=3, num_splits=max(1, chosen.num_splits // 2)),
        "4 stages": chosen._replace(num_stages=4),
        "spans of 128": chosen._replace(min_span=128),
        "8 warps": chosen._replace(num_warps=8),
        "blocks of 32": chosen._replace(block_n=32, num_stages=4),
    }
    if dim < 128:
        others["blocks of 128"] = chosen._replace(block_n=128)
    found["other_seconds"] = {name: _tried(partial(measure, tiling)) for name, tiling in others.items()}
    return found


def _tried(measure: partial[float]) -> float | str:
    """Seconds, or why not: another tiling may not fit the device."""
    try:
        return measure()
    except Exception as error:
        if "illegal" in str(error) or "misaligned" in str(error):
            raise
        return f"{type(error).__name__}: {error}"[:100]


def _weights(outputs: int, inputs: int, warm_up: bool) -> list[Tensor]:
    count = 1 if warm_up else max(4, -(-4 * L2_BYTES // (2 * outputs * inputs)))
    return [normal(outputs, inputs, seed=seed % 3, dtype=_BF16) for seed in range(min(count, 160))]


def _streamings(rows: int, chosen: Streaming) -> dict[str, Streaming]:
    tried = {_name(streaming): streaming for streaming in (_FEW_ROWS if rows <= 16 else _MANY_ROWS)}
    return {_name(chosen): chosen} | tried


def _name(streaming: Streaming) -> str:
    return "n{} k{} w{} s{} x{}".format(*streaming)


def _processors() -> int:
    is_gpu = device().type == "cuda"
    return torch.cuda.get_device_properties(device()).multi_processor_count if is_gpu else 132


def _linear(rows: int, inputs: int, outputs: int, warm_up: bool) -> dict[str, Any]:
    weights, x = _weights(outputs, inputs, warm_up), normal(rows, inputs, dtype=_BF16)
    repeats = 1 if warm_up else 3
    chosen = choose_streaming(rows, inputs, outputs, False, _processors())
    ways = {
        name: _tried(partial(seconds_each, [partial(skinny_linear, x, w, None, streaming) for w in weights], repeats))
        for name, streaming in _streamings(rows, chosen).items()
    }
    plain = seconds_each([partial(torch.nn.functional.linear, x, w) for w in weights], repeats)
    return _compared(2 * inputs * outputs, plain, ways, _name(chosen))


def _gate_up(rows: int, inputs: int, inter: int, warm_up: bool) -> dict[str, Any]:
    weights, x = _weights(2 * inter, inputs, warm_up), normal(rows, inputs, dtype=_BF16)
    repeats = 1 if warm_up else 3
    chosen = choose_streaming(rows, inputs, inter, True, _processors())
    ways = {
        name: _tried(partial(seconds_each, [partial(streamed_gate_up, x, w, streaming) for w in weights], repeats))
        for name, streaming in _streamings(rows, chosen).items()
        if streaming.num_splits == 1
    }
    plain = seconds_each([partial(skinny_gate_up, x, w, LinearBackend.TORCH) for w in weights], repeats)
    return _compared(4 * inputs * inter, plain, ways, _name(chosen))


def _compared(num_bytes: int, torch_s: float, ways: dict[str, float | str], chosen: str) -> dict[str, Any]:
    times = {name: seconds for name, seconds in ways.items() if isinstance(seconds, float)}
    best = min(times, key=lambda name: times[name]) if times else None
    return {
        "bytes": num_bytes,
        "seconds": ways[chosen],
        "torch_seconds": torch_s,
        "chosen": chosen,
        "best": best,
        "best_seconds": None if best is None else times[best],
        "all_seconds": ways,
    }


def _elementwise(rows: int, warm_up: bool) -> dict[str, Any]:
    """Microseconds of the ops around the products, at the sizes of an 8B model: launches are most of it."""
    repeats = 1 if warm_up else 5
    x, residual, weight = normal(rows, 4096, dtype=_BF16), normal(rows, 4096, dtype=_BF16), normal(4096, dtype=_BF16)
    gate_up, qkv = normal(rows, 28672, dtype=_BF16), normal(rows, 48 * 128, dtype=_BF16)
    batch, pages = tree_round([1000] * rows, [[-1]] * rows, 1, 16, 1024)
    pool, angles = torch.zeros(pages, 2, 16, 8, 128, dtype=_BF16, device=device()), normal(2048, 64)
    tables = angles.cos(), angles.sin()
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": partial(rms_norm, x, weight, 1e-5),
        "add_rms_norm": partial(add_rms_norm, x, residual, weight, 1e-5),
        "silu_mul": partial(silu_mul, gate_up),
        "place_qkv": partial(place_qkv, qkv, pool[:, 0], pool[:, 1], batch, batch.positions, *tables),
        "torch add": partial(torch.add, x, residual),
    }
    return {"microseconds": {name: 1e6 * seconds_each([call] * 20, repeats) for name, call in calls.items()}}


def _choices(rows: int, count: int, warm_up: bool) -> dict[str, Any]:
    repeats = 1 if warm_up else 3
    logits, positions = 3 * normal(rows, count), torch.arange(rows, device=device())

    def params(top_k: int, top_p: float) -> Any:
        return build_sampling_rows(
            [0.8] * rows, [top_k] * rows, [top_p] * rows, [0.0] * rows, list(range(rows)), device()
        )

    calls: dict[str, Callable[[], object]] = {
        "argmax": partial(argmax, logits),
        "top_k 1": partial(top_k, logits, 1),
        "top_k 4": partial(top_k, logits, 4),
        "top_k 8": partial(top_k, logits, 8),
        "sample": partial(sample, logits, params(0, 1.0), positions),
        "sample top-k 50, top-p 0.9": partial(sample, logits, params(50, 0.9), positions),
        "sample top-p 0.9": partial(sample, logits, params(0, 0.9), positions),
        "torch argmax": partial(torch.argmax, logits, -1),
        "torch top_k 8": partial(torch.topk, logits, 8),
    }
    return {
        "bytes": 4 * rows * count,
        "microseconds": {name: 1e6 * seconds_each([call] * 4, repeats) for name, call in calls.items()},
    }


def _trees(trees: int, warm_up: bool) -> dict[str, Any]:
    repeats = 1 if warm_up else 5
    parents = torch.tensor([[-1, *(index // 2 for index in range(15))]] * trees, device=device())
    counts = torch.full((trees,), 16, device=device())
    tokens = torch.zeros_like(parents)
    calls: dict[str, Callable[[], object]] = {
        "tree_rows": partial(tree_rows, parents, counts),
        "walk_trees, all accepted": partial(walk_trees, tokens, parents, counts, tokens, 5),
    }
    return {"microseconds": {name: 1e6 * seconds_each([call] * 20, repeats) for name, call in calls.items()}}
