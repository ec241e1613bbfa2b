"""Draft growth in one call: the trees, and the KV rows, of the same growth made of single ops."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import normal, threads
from torch import Tensor

from graftline.kernels.activation import silu_mul
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.draft_growth import DraftGrowth, DraftShape, DraftWeights
from graftline.kernels.kv_write import write_kv
from graftline.kernels.linear import linear, pack_linear, unpack_rows
from graftline.kernels.norm import add_rms_norm, rms_norm
from graftline.kernels.rope import rope_
from graftline.kernels.sample import top_k

HIDDEN, EMBED, HEADS, KV_HEADS, DIM, INTER, VOCAB, PAGE = 40, 24, 4, 2, 16, 32, 90, 4


def draft(kind: str, dtype: torch.dtype = torch.float32, reduced: bool = True) -> tuple[DraftWeights, DraftShape]:
    fused = kind != "eagle3"
    draft_vocab = 50 if reduced else VOCAB

    def matrix(rows: int, columns: int, seed: int, bias: bool = False):
        return pack_linear(
            normal(rows, columns, seed=seed) / columns**0.5, normal(rows) if bias else None, storage=dtype
        )

    qkv_inputs = HIDDEN if fused else EMBED + HIDDEN
    input_norm = {"eagle3": normal(EMBED, seed=21), "eagle": None, "eagle-norm": normal(HIDDEN, seed=21)}[kind]
    weights = DraftWeights(
        embedding=matrix(VOCAB, EMBED, 1),
        fusion=matrix(HIDDEN, EMBED + HIDDEN, 2, bias=True) if fused else None,
        input_norm=input_norm,
        feature_norm=None if fused else normal(HIDDEN, seed=22),
        qkv=matrix((HEADS + 2 * KV_HEADS) * DIM, qkv_inputs, 3, bias=True),
        output=matrix(HIDDEN, HEADS * DIM, 4),
        post_norm=normal(HIDDEN, seed=23),
        gate_up=matrix(2 * INTER, HIDDEN, 5),
        down=matrix(HIDDEN, INTER, 6),
        final_norm=None if kind == "eagle" else normal(HIDDEN, seed=24),
        head=matrix(draft_vocab, HIDDEN, 7),
        target_ids=(torch.arange(draft_vocab) * 7 + 3) % VOCAB if reduced else None,
    )
    angles = normal(80, DIM // 2, seed=8)
    return weights, DraftShape(HEADS, KV_HEADS, DIM, 1e-5, 0.25, 1, angles.cos(), angles.sin())


def run_layer(w: DraftWeights, s: DraftShape, feature: Tensor, tokens: Tensor, batch, k_pages, v_pages) -> Tensor:
    """The draft layer from single ops over *all* rows of a batch."""
    embedded = unpack_rows(w.embedding, tokens)
    if w.fusion is not None:
        residual = inputs = linear(torch.cat((embedded, feature), dim=-1), w.fusion)
        if w.input_norm is not None:
            inputs = rms_norm(residual, w.input_norm, s.eps)
    else:
        residual = feature
        inputs = torch.cat((rms_norm(embedded, w.input_norm, s.eps), rms_norm(feature, w.feature_norm, s.eps)), dim=-1)
    qkv = linear(inputs, w.qkv).view(-1, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    rope_(q, k, batch.positions + s.position_offset, s.cos, s.sin)
    write_kv(k, v, k_pages, v_pages, batch)
    attended = linear(paged_attention(q, k_pages, v_pages, batch, s.scale).flatten(1), w.output)
    normed, residual = add_rms_norm(attended, residual, w.post_norm, s.eps)
    return residual + linear(silu_mul(linear(normed, w.gate_up)), w.down)


def grow_plainly(
    w: DraftWeights, s: DraftShape, output: Tensor, start: int, table: list[int], pages: Tensor,
    depth: int, width: int, num_drafts: int,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """One tree; every level runs all rows grown so far anew."""
    k_pages, v_pages = pages[:, 0], pages[:, 1]

    def children(hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = hidden if w.final_norm is None else rms_norm(hidden, w.final_norm, s.eps)
        scores, ids = top_k(linear(normed, w.head), width)
        return scores, ids if w.target_ids is None else w.target_ids[ids]

    first_scores, first_ids = children(output)
    scores, tokens, parents = first_scores[0].tolist(), first_ids[0].tolist(), [-1] * width
    beam = list(range(width))
    row_tokens: list[int] = []
    row_parents: list[int] = []
    features = torch.empty(0, HIDDEN)
    beam_features, beam_parents = output.expand(width, HIDDEN), [-1] * width
    for level in range(depth - 1):
        row_tokens += [tokens[node] for node in beam]
        row_parents += beam_parents
        features = torch.cat((features, beam_features))
        batch = build_attention_batch([SegmentRows(start, len(row_tokens), table, row_parents)], PAGE)
        hidden = run_layer(w, s, features, torch.tensor(row_tokens), batch, k_pages, v_pages)[-width:]
        child_scores, child_ids = children(hidden)
        first = len(scores)
        for index, node in enumerate(beam):
            scores += (torch.tensor(scores[node]) + child_scores[index]).tolist()
            tokens += child_ids[index].tolist()
            parents += [node] * width
        order = sorted(range(first, len(scores)), key=lambda node: (-scores[node], node))[:width]
        rows = [beam.index(parents[node]) for node in order]
        beam, beam_features, beam_parents = order, hidden[rows], [level * width + row for row in rows]
    kept = sorted(range(len(scores)), key=lambda node: (-scores[node], node))[:num_drafts]
    number = {-1: 0} | {node: place for place, node in enumerate(kept, start=1)}
    return [tokens[node] for node in kept], [number[parents[node]] for node in kept]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "eagle-norm"])
@pytest.mark.parametrize(("depth", "width", "num_drafts"), [(1, 1, 1), (4, 1, 4), (1, 5, 3), (3, 2, 7), (4, 3, 30)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_trees_are_those_of_the_single_ops(
    kind: str, depth: int, width: int, num_drafts: int, num_threads: int
) -> None:
    weights, shape = draft(kind, reduced=kind != "eagle")
    starts = [5, 0, 11]
    tables = [[9, 2, 30, 4, 8, 11], [0, 1, 3, 5], [6, 7, 10, 12, 13, 14, 15]]
    pages = normal(31, 2, PAGE, KV_HEADS, DIM, seed=9)
    outputs = normal(3, HIDDEN, seed=10)
    native_pages, plain_pages = pages.clone(), pages.clone()
    growth = DraftGrowth(weights, shape)
    with threads(num_threads):
        tokens, parents = growth.grow(
            outputs, starts, tables, native_pages[:, 0], native_pages[:, 1],
            depth=depth, width=width, num_drafts=num_drafts,
        )  # fmt: skip
    for tree in range(3):
        expected_tokens, expected_parents = grow_plainly(
            weights, shape, outputs[tree : tree + 1], starts[tree], tables[tree], plain_pages, depth, width, num_drafts
        )
        assert tokens[tree].tolist() == expected_tokens
        assert parents[tree].tolist() == expected_parents
    assert torch.equal(native_pages, plain_pages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_tree_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    weights, shape = draft("eagle3", dtype)
    growth = DraftGrowth(weights, shape)
    outputs, starts, tables = normal(4, HIDDEN, seed=10), [3, 9, 0, 14], [[*range(8 * i, 8 * i + 8)] for i in range(4)]
    pages = normal(32, 2, PAGE, KV_HEADS, DIM, seed=9).bfloat16()

    def grown(chosen: list[int]) -> tuple[Tensor, Tensor]:
        data = pages.clone()
        return growth.grow(
            outputs[chosen], [starts[i] for i in chosen], [tables[i] for i in chosen], data[:, 0], data[:, 1],
            depth=4, width=2, num_drafts=7,
        )  # fmt: skip

    together = grown([2, 0, 3, 1])
    for place, tree in enumerate([2, 0, 3, 1]):
        alone = grown([tree])
        assert torch.equal(alone[0][0], together[0][place])
        assert torch.equal(alone[1][0], together[1][place])


def test_poisoned_outputs_still_give_a_tree() -> None:
    """CASES I12: NaN in one request's features must neither crash the drafter nor reach its neighbour."""
    growth = DraftGrowth(*draft("eagle3"))
    outputs = normal(2, HIDDEN, seed=10)
    pages = normal(20, 2, PAGE, KV_HEADS, DIM, seed=9)
    options = {"depth": 3, "width": 2, "num_drafts": 6}
    data = pages.clone()
    good = growth.grow(outputs[1:], [4], [[*range(10, 20)]], data[:, 0], data[:, 1], **options)
    outputs[0] = torch.nan
    data = pages.clone()
    tables = [[*range(10)], [*range(10, 20)]]
    tokens, parents = growth.grow(outputs, [4, 4], tables, data[:, 0], data[:, 1], **options)
    assert torch.equal(tokens[1], good[0][0])
    assert torch.equal(parents[1], good[1][0])
    assert ((tokens[0] >= 0) & (tokens[0] < VOCAB)).all()
    assert all(parent <= node for node, parent in enumerate(parents[0].tolist()))


def test_misfits_are_named() -> None:
    weights, shape = draft("eagle3")
    growth = DraftGrowth(weights, shape)
    pages = torch.zeros(8, 2, PAGE, KV_HEADS, DIM)
    k, v = pages[:, 0], pages[:, 1]

    def grow(starts=(3,), table=(0, 1, 2, 3), depth=3, width=2, num_drafts=5, outputs=None) -> None:
        outputs = normal(len(starts), HIDDEN) if outputs is None else outputs
        growth.grow(outputs, starts, [table] * len(starts), k, v, depth=depth, width=width, num_drafts=num_drafts)

    grow()
    for options, message in (
        ({"depth": 0}, "depth 0"),
        ({"width": 51}, "width 51"),
        ({"num_drafts": 11}, "num_drafts 11"),
        ({"outputs": normal(1, HIDDEN + 1)}, "outputs"),
        ({"starts": (78,)}, "starts: 78"),
        ({"starts": (-1,)}, "starts: -1"),
        ({"table": (0,)}, "page_tables: 1 pages"),
        ({"table": (0, 1, 2, 8)}, "page_tables"),
    ):
        with pytest.raises(ValueError, match=message):
            grow(**options)
    for wrong, message in (
        (replace(weights, down=weights.output), "gate_up|down"),
        (replace(weights, feature_norm=None), "feature_norm"),
        (replace(weights, post_norm=normal(7)), "post_norm"),
        (replace(weights, target_ids=torch.full((50,), VOCAB)), "outside the vocabulary"),
        (replace(weights, target_ids=None, head=pack_linear(normal(VOCAB + 1, HIDDEN))), "head"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftGrowth(wrong, shape)
