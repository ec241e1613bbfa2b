"""Plain generation: one request, one process, no speculation. What the whole system must equal token for token."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from graftline.engine.models.target_model import TargetModel
from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.engine.verify_state import StepStates
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.sample import build_sampling_rows, sample
from graftline.kernels.state_rows import build_state_rows

_PAGE_SIZE = 16


class OneRequestKv:
    """KV pages of one request for all layers of a model, page ids in order, and its recurrent state if it has any."""

    def __init__(self, model: TargetModel, num_slots: int, page_size: int = _PAGE_SIZE) -> None:
        config = model.config
        self.page_size = page_size
        self.page_ids = range(-(-num_slots // page_size))
        shape = (config.num_layers, 2, len(self.page_ids), page_size, config.num_kv_heads, config.head_dim)
        self._data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._states: StatePool | None = None
        if config.hybrid is not None:
            layers = config.linear_layers(range(config.num_layers))
            self._states = StatePool(StateGeometry(layers, config.hybrid.linear, model.dtype), 1, model.device)

    def layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Two of [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._data[layer, 0], self._data[layer, 1]

    def step_states(self, batch: AttentionBatch) -> StepStates | None:
        """The recurrent state for a forward of the one request."""
        if self._states is None:
            return None
        return StepStates(self._states, None, build_state_rows(batch, [batch.num_rows], [0], [False]))


def forward(model: TargetModel, token_ids: Sequence[int], start: int, kv: OneRequestKv) -> Tensor:
    """Logits [rows, vocab] of `token_ids` that follow `start` earlier tokens of the same request."""
    batch = build_attention_batch([SegmentRows(start, len(token_ids), kv.page_ids)], kv.page_size, model.device)
    hidden = model.embed(torch.tensor(token_ids, device=model.device))
    hidden, _ = model.run_layers(hidden, batch, kv, states=kv.step_states(batch))
    return model.logits(model.final_norm(hidden))


def generate(
    model: TargetModel,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Output ids of one request, the ending id of `eos_ids` included; see `kernels.sample` for the parameters.

    Generation also ends when the model's context is full.
    """
    params = build_sampling_rows([temperature], [top_k], [top_p], [min_p], [seed], model.device)
    length = min(len(prompt_ids) + max_tokens, model.config.context_length)
    kv = OneRequestKv(model, length)
    ids = list(prompt_ids)
    computed = 0
    while len(ids) < length:
        logits = forward(model, ids[computed:], computed, kv)
        computed = len(ids)
        position = torch.tensor([computed], device=model.device)
        ids.append(int(sample(logits[-1:], params, position)))
        if ids[-1] in eos_ids:
            break
    return ids[len(prompt_ids) :]


def greedy(
    model: TargetModel, prompt_ids: Sequence[int], max_tokens: int, *, eos_ids: Collection[int] = ()
) -> list[int]:
    """`generate` at temperature 0."""
    return generate(model, prompt_ids, max_tokens, eos_ids=eos_ids)
