"""What a draft tree would have been worth on an answer already written: EAGLE-2's dynamic trees, all roots at once.

Level 1 holds the K likeliest children of the root; below, the K best nodes of a level (by the product of their
path's probabilities) grow K children each; the best V - 1 of all these nodes make the tree (Li et al. 2024, section 4).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.module import (
    HeadWeights,
    after_attention,
    before_attention,
    fuse,
    rope_of,
    to_logit_space,
)
from graftline.engine.tree_shape import TreeShape


@dataclass(frozen=True, slots=True)
class _Beam:
    """The K nodes of a level that grow, for P roots."""

    outputs: Tensor  # [P, K, h] h' of each node's parent: the feature its row reads
    tokens: Tensor  # [P, K] target ids
    scores: Tensor  # [P, K] log of the path's probability
    right: Tensor  # [P, K] bool: the path so far is the answer's own
    keys: Tensor  # [P, K, kv heads, j, d] of its ancestors' rows below the root
    values: Tensor


class TreeSimulator:
    """Grows trees from real rows of one answer. Weights, embeddings and features share one type and device."""

    def __init__(
        self, config: DraftHeadConfig, weights: HeadWeights, embed: Tensor, vocab_rows: Tensor, kept_ids: Tensor
    ) -> None:
        self._config, self._weights = config, weights
        self._embed, self._vocab_rows, self._kept_ids = embed, vocab_rows, kept_ids

    @torch.no_grad()
    def accepted(self, tokens: Tensor, features: Tensor, first_row: int, shape: TreeShape) -> Tensor:
        """Accepted drafts for each root row from `first_row` to the third token from the end: [P] int64.

        Args:
            tokens: [T] int64 of prompt and answer.
            features: [T, n * target_h].
        """
        config, weights, device = self._config, self._weights, tokens.device
        embeddings = functional.embedding(tokens[1:], self._embed)[None]
        cos, sin = rope_of(config, config.position_offset, len(tokens) + shape.depth, embeddings)
        real = features[None, :-1]
        length = real.shape[1]
        state = fuse(config, weights, embeddings, real)
        q, k, v = before_attention(weights, embeddings, state, cos[:length], sin[:length], config)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs = after_attention(weights, state, mixed, config)[0]
        roots = torch.arange(first_row, len(tokens) - 2, device=device)
        beam, scores, right = self._first_level(outputs[roots], self._answer_at(tokens, roots + 2), shape)
        all_scores, all_right = [scores], [right]
        for depth in range(1, shape.depth):
            where = cos[roots + depth], sin[roots + depth]
            grown, keys, values = self._row_outputs(beam, k[0], v[0], roots, where)
            beam, scores, right = self._next_level(
                beam, grown, keys, values, self._answer_at(tokens, roots + 2 + depth), shape.branching
            )
            all_scores.append(scores)
            all_right.append(right)
        return _deepest_right(all_scores, all_right, shape.nodes - 1)

    @staticmethod
    def _answer_at(tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens at places; -1 past the end."""
        return torch.where(places < len(tokens), tokens[places.clamp(max=len(tokens) - 1)], -1)

    def _children(self, outputs: Tensor, branching: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the likeliest next tokens after h' [..., h]."""
        logits = functional.linear(to_logit_space(self._config, self._weights, outputs), self._vocab_rows).float()
        best, ids = torch.log_softmax(logits, dim=-1).topk(branching, dim=-1)
        return best, self._kept_ids[ids]

    def _first_level(self, outputs: Tensor, wanted: Tensor, shape: TreeShape) -> tuple[_Beam, Tensor, Tensor]:
        scores, ids = self._children(outputs, shape.branching)
        right = ids == wanted[:, None]
        empty = outputs.new_empty(len(outputs), shape.branching, self._config.num_kv_heads, 0, self._config.head_dim)
        parents = outputs[:, None].expand(-1, shape.branching, -1)
        return _Beam(parents, ids, scores, right, empty, empty), scores, right

    def _row_outputs(
        self, beam: _Beam, real_keys: Tensor, real_values: Tensor, roots: Tensor, where: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head's rows of the beam's nodes: h' [P, K, h], and keys and values with their own rows added.

        Args:
            real_keys, real_values: [kv heads, N, d] of all real rows.
            where: rotary tables [P, d] at the rows' positions.
        """
        config, weights = self._config, self._weights
        embeddings = functional.embedding(beam.tokens, self._embed)
        state = beam.outputs
        if config.kind is DraftHeadKind.EAGLE:
            state = fuse(config, weights, embeddings, state)
        cos, sin = (table[:, None, None] for table in where)
        flat_embeddings, flat_state = embeddings.flatten(0, 1)[:, None], state.flatten(0, 1)[:, None]
        num_roots, branching = beam.tokens.shape
        cos, sin = (table.expand(-1, branching, 1, -1).flatten(0, 1)[:, None] for table in (cos, sin))
        q, k, v = before_attention(weights, flat_embeddings, flat_state, cos, sin, config)
        groups = config.num_heads // config.num_kv_heads
        q = q.view(num_roots, branching, config.num_kv_heads, groups, config.head_dim)
        keys = torch.cat([beam.keys, k.view(num_roots, branching, config.num_kv_heads, 1, -1)], dim=3)
        values = torch.cat([beam.values, v.view(num_roots, branching, config.num_kv_heads, 1, -1)], dim=3)
        scale = config.head_dim**-0.5
        to_real = torch.einsum("pkhgd,hnd->pkhgn", q, real_keys).float() * scale
        hidden = torch.arange(real_keys.shape[1], device=q.device)[None] > roots[:, None]
        to_real = to_real.masked_fill(hidden[:, None, None, None], float("-inf"))
        to_path = torch.einsum("pkhgd,pkhjd->pkhgj", q, keys).float() * scale
        shares = torch.softmax(torch.cat([to_real, to_path], dim=-1), dim=-1).to(q.dtype)
        of_real, of_path = torch.split(shares, [real_keys.shape[1], keys.shape[3]], dim=-1)
        mixed = torch.einsum("pkhgn,hnd->pkhgd", of_real, real_values)
        mixed = mixed + torch.einsum("pkhgj,pkhjd->pkhgd", of_path, values)
        mixed = mixed.reshape(num_roots * branching, config.num_heads, 1, config.head_dim)
        grown = after_attention(weights, flat_state, mixed, config)
        return grown.view(num_roots, branching, -1), keys, values

    def _next_level(
        self, beam: _Beam, grown: Tensor, keys: Tensor, values: Tensor, wanted: Tensor, branching: int
    ) -> tuple[_Beam, Tensor, Tensor]:
        gains, ids = self._children(grown, branching)
        scores = (beam.scores[..., None] + gains).flatten(1)
        right = (beam.right[..., None] & (ids == wanted[:, None, None])).flatten(1)
        best = scores.topk(branching, dim=1).indices
        parents = best // branching

        def of_parents(tensor: Tensor) -> Tensor:
            index = parents.view(*parents.shape, *(1,) * (tensor.ndim - 2)).expand(-1, -1, *tensor.shape[2:])
            return tensor.gather(1, index)

        chosen = _Beam(
            of_parents(grown),
            ids.flatten(1).gather(1, best),
            scores.gather(1, best),
            right.gather(1, best),
            of_parents(keys),
            of_parents(values),
        )
        return chosen, scores, right


def _deepest_right(scores: list[Tensor], right: list[Tensor], num_kept: int) -> Tensor:
    """Depth of the deepest node on the answer's own path among the best `num_kept` nodes: [P]."""
    joined = torch.cat(scores, dim=1)
    kept = torch.zeros_like(joined, dtype=torch.bool)
    kept.scatter_(1, joined.topk(min(num_kept, joined.shape[1]), dim=1).indices, True)
    depths = torch.cat([torch.full_like(level, depth, dtype=torch.int64) for depth, level in enumerate(scores, 1)], 1)
    return (depths * (kept & torch.cat(right, dim=1))).amax(1)
