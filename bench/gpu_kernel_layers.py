"""Times of whole decoder layers of an 8B model in one CUDA graph: kernels behind each other, as rounds have them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from graftline.bench.gpu_kernel_items import Item, device, normal, seconds_each, tree_round
from graftline.engine.models.dense import LayerWeights
from graftline.kernels.decoder_layer import DenseLayers, LayerPages
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.linear import LinearWeight, pack_linear

_LAYERS, _SMOL_LAYERS = 8, 30
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a dense layer."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Elements of its matrices."""
        columns = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (columns + 3 * self.inter)


EIGHT_B = LayerSizes(4096, 14336, 32, 8, 128)
SMOL = LayerSizes(576, 1536, 9, 3, 64)


def list_layers() -> list[Item]:
    """Batches and contexts that rounds must be fast at."""
    return [
        Item(
            f"layers 8B batch {batch} context {context} rows {rows}",
            partial(time_layers, EIGHT_B, _LAYERS, batch, context, rows),
        )
        for context in (1024, 8192)
        for batch in (1, 4, 16)
        for rows in (1, 16)
    ] + [
        Item(f"layers SmolLM2 batch 1 context 512 rows {rows}", partial(time_layers, SMOL, _SMOL_LAYERS, 1, 512, rows))
        for rows in (1, 16)
    ]


def time_layers(
    sizes: LayerSizes, num_layers: int, batch: int, context: int, rows: int, warm_up: bool
) -> dict[str, Any]:
    """Microseconds a layer by single ops and, where it serves the batch, by the resident kernel, beside its bytes."""
    count = 1 if warm_up else num_layers
    layers = _layers(sizes, count)
    round_of, num_pages = tree_round(
        [context] * batch, [[-1, *range(rows - 1)]] * batch, rows, _PAGE_SIZE, context + 2 * _PAGE_SIZE + rows
    )
    pool = torch.empty(
        num_pages, count, 2, _PAGE_SIZE, sizes.kv_heads, sizes.head_dim, dtype=_dtype(), device=device()
    ).normal_()
    pages = LayerPages([(pool[:, index, 0], pool[:, index, 1]) for index in range(count)])
    hidden = normal(batch * rows, sizes.hidden, dtype=_dtype())
    out = torch.empty_like(hidden)
    times = {}
    for name, run in (("a layer", layers.run_composed), ("resident", layers.run_resident)):
        if name == "a layer" or layers.can_reside(round_of, pages):
            call = partial(_into, out, partial(run, hidden, round_of, pages))
            times[name] = 1e6 * seconds_each([call], 1 if warm_up else 9) / count
    num_bytes = 2 * (sizes.num_elements + batch * context * 2 * sizes.kv_heads * sizes.head_dim)
    return {"bytes": num_bytes, "microseconds": times}


@cache
def _layers(sizes: LayerSizes, count: int) -> DenseLayers:
    """Random ones; kept, since every item has the same."""
    q_size, kv_size = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    angles = normal(1 << 15, sizes.head_dim // 2)

    def weight(outputs: int, inputs: int) -> LinearWeight:
        values = torch.empty(outputs, inputs, dtype=_dtype(), device=device()).normal_(std=inputs**-0.5)
        return pack_linear(values)

    norm = torch.ones(sizes.hidden, dtype=_dtype(), device=device())
    weights = [
        LayerWeights(
            norm, weight(q_size + 2 * kv_size, sizes.hidden), None, None, weight(sizes.hidden, q_size), norm,
            weight(2 * sizes.inter, sizes.hidden), weight(sizes.hidden, sizes.inter),
        )
        for _ in range(count)
    ]  # fmt: skip
    shape = DecoderLayerShape(
        sizes.heads, sizes.kv_heads, sizes.head_dim, 1e-5, sizes.head_dim**-0.5, angles.cos(), angles.sin()
    )
    return DenseLayers(weights, shape)


def _dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def _into(out: Tensor, run: Callable[[], tuple[Tensor, dict[int, Tensor]]]) -> None:
    out.copy_(run()[0])
