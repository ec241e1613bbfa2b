"""Small heads and inputs that several tests build."""

from dataclasses import replace

import torch
from torch import Tensor

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.module import (
    DraftHeadModule,
    HeadWeights,
    after_attention,
    before_attention,
    fuse,
    rope_of,
)

EAGLE3 = DraftHeadConfig(
    kind=DraftHeadKind.EAGLE3,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=24,
    draft_vocab_size=24,
    feature_layers=(1, 2, -1),
)
EAGLE = replace(EAGLE3, kind=DraftHeadKind.EAGLE, feature_layers=(-1,), norm_output=False)


def weights_of(config: DraftHeadConfig, seed: int = 0) -> HeadWeights:
    with torch.no_grad():
        return DraftHeadModule(config, len(config.feature_layers), seed=seed).cast(torch.float32)


def naive_path(
    config: DraftHeadConfig, weights: HeadWeights, embeddings: Tensor, features: Tensor, root: int, drafted: Tensor
) -> Tensor:
    """h' of the last row, one row at a time: embeddings [N, h] of real rows, drafted [n, h] of those below the root."""
    rows = root + 1
    cos, sin = rope_of(config, config.position_offset, rows + len(drafted), embeddings)
    state = fuse(config, weights, embeddings[None, :rows], features[None, :rows])
    q, keys, values = before_attention(weights, embeddings[None, :rows], state, cos[:rows], sin[:rows], config)
    attend = torch.nn.functional.scaled_dot_product_attention
    output = after_attention(weights, state, attend(q, keys, values, is_causal=True, enable_gqa=True), config)[:, -1:]
    for number, embedding in enumerate(drafted):
        at = slice(rows + number, rows + number + 1)
        state = output
        if config.kind is DraftHeadKind.EAGLE:
            state = fuse(config, weights, embedding[None, None], output)
        q, k, v = before_attention(weights, embedding[None, None], state, cos[at], sin[at], config)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        output = after_attention(weights, state, attend(q, keys, values, enable_gqa=True), config)
    return output[0, 0]
