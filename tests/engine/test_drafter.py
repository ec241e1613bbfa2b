"""Growth of draft trees against a naive one: no pages, no batches, every node computed anew along its own path."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tiny_world import TinyWorld
from torch import Tensor

from graftline.engine.draft_head.config import WEIGHTS_FILE, DraftHeadKind
from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.draft_layer import DraftLayer, TargetHead
from graftline.engine.draft_scratch import scratch_pages_for
from graftline.engine.drafter import Drafter, GrowthRoot
from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.request import DraftTree
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch

CPU = torch.device("cpu")
SHAPES = (
    (TreeShape(1, 1, 2), 4),
    (TreeShape(3, 1, 4), 1),
    (TreeShape(3, 1, 4), 4),
    (TreeShape(7, 1, 8), 4),
    (TreeShape(1, 4, 4), 1),
    (TreeShape(3, 2, 6), 4),
    (TreeShape(4, 2, 8), 1),
    (TreeShape(4, 2, 8), 4),
    (TreeShape(4, 3, 31), 4),
)


class NaiveHead:
    """A draft head written out: rows of one path in, outputs out, attention over the whole path at once."""

    def __init__(self, path: Path, layer: DraftLayer, model_path: Path) -> None:
        weights = load_file(path / WEIGHTS_FILE)
        target = load_file(model_path / "model.safetensors")
        self.config = layer.config
        self.eagle3 = layer.config.kind is DraftHeadKind.EAGLE3
        self.weights = {name.removeprefix("midlayer.").removeprefix("layers.0."): t for name, t in weights.items()}
        self.embedding = target["model.embed_tokens.weight"]
        self.ids = torch.arange(self.config.draft_vocab_size)
        if "d2t" in weights:
            self.ids = self.ids + weights["d2t"]
        self.head = target["lm_head.weight"][self.ids]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.weights[name]

    def project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].t()

    def fuse(self, features: Tensor) -> Tensor:
        return self.project(features, "fc") if self.eagle3 else features

    def outputs(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """[rows, hidden] fused features and the tokens behind them, from position 0 on -> [rows, hidden]."""
        embedded = self.embedding[torch.tensor(tokens)]
        if self.eagle3:
            residual = features
            normed = self.norm(embedded, "input_layernorm.weight"), self.norm(features, "hidden_norm.weight")
            x = torch.cat(normed, dim=-1)
        else:
            x = residual = self.project(torch.cat((embedded, features), dim=-1), "fc")
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q = self._rotate(self.project(x, "self_attn.q_proj").view(-1, heads, dim))
        k = self._rotate(self.project(x, "self_attn.k_proj").view(-1, kv_heads, dim))
        v = self.project(x, "self_attn.v_proj").view(-1, kv_heads, dim)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = residual + self.project(attended, "self_attn.o_proj")
        hidden = self.norm(residual, "post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(self.project(hidden, "mlp.gate_proj")) * self.project(hidden, "mlp.up_proj")
        return residual + self.project(gated, "mlp.down_proj")

    def children(self, output: Tensor, count: int) -> list[tuple[float, int]]:
        """The likeliest tokens behind a row, with their log-probabilities."""
        logits = (self.norm(output, "norm.weight") if self.eagle3 else output) @ self.head.t()
        values, index = logits.log_softmax(-1).sort(descending=True, stable=True)
        return [(float(value), int(self.ids[i])) for value, i in zip(values[:count], index[:count], strict=True)]

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        angles = torch.outer(
            torch.arange(x.shape[0], dtype=torch.float32) + self.config.position_offset,
            self.config.rope_theta ** (-torch.arange(half) / half),
        )
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True)
class Node:
    """A candidate.

    Attributes:
        rows: fused features of the path's rows, the one that this node's token goes with included.
        tokens: the token behind each of them, this node's last.
    """

    score: float
    parent: "Node | None"
    rows: Tensor
    tokens: list[int]


def naive_tree(head: NaiveHead, features: Tensor, tokens: list[int], shape: TreeShape) -> DraftTree:
    """EAGLE-2's growth in its own words: expand the K best of every level, then keep the V - 1 best of all."""

    def expand(node: Node) -> list[Node]:
        output = head.outputs(node.rows, node.tokens)[-1]
        rows = torch.cat((node.rows, output.unsqueeze(0)))
        likeliest = head.children(output, shape.branching)
        return [Node(node.score + value, node, rows, [*node.tokens, token]) for value, token in likeliest]

    root = Node(0.0, None, head.fuse(features), tokens)
    level = expand(root)
    everyone = list(level)
    for _ in range(shape.depth - 1):
        children = [child for node in level for child in expand(node)]
        everyone += children
        level = sorted(children, key=lambda node: -node.score)[: shape.branching]
    best = sorted(everyone, key=lambda node: -node.score)[: shape.nodes - 1]
    kept = [root, *best]
    number = {id(node): index for index, node in enumerate(kept)}
    parents = [number[id(node.parent)] for node in kept[1:]]
    return DraftTree(tuple(node.tokens[-1] for node in kept), (-1, *parents))


class Bench:
    """A drafter with a pool whose pages are dealt out in random order, full of NaN where nothing was written."""

    def __init__(
        self,
        world: TinyWorld,
        path: Path,
        shape: TreeShape,
        page_size: int,
        *,
        max_trees: int = 8,
        at_once: bool = True,
    ) -> None:
        model = world.plain.model
        shared = TargetHead(model.embed, model.head_rows, model.logits, 4, model.config.context_length)
        if at_once:
            shared = replace(shared, embedding=model.embedding, head=model.head)
        self.layer = DraftLayer(path, shared, torch.float32, CPU)
        assert (self.layer.growth is not None) == at_once
        config = self.layer.config
        geometry = KvGeometry(1, page_size, config.num_kv_heads, config.head_dim, torch.float32)
        scratch = scratch_pages_for(shape, page_size, max_trees)
        self.pool = KvPool(geometry, 300 // page_size, layers=(0,), scratch_pages=scratch)
        self.pool.data.fill_(torch.nan)
        self.drafter = Drafter(self.layer, self.pool, shape)
        self.naive = NaiveHead(path, self.layer, world.plain.path)
        self._free = list(range(self.pool.num_pages))
        Random(0).shuffle(self._free)
        self._page_size = page_size

    def pages(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self._page_size))]

    def extend(self, features: Tensor, tokens: list[int], pages: list[int], start: int = 0) -> Tensor:
        batch = build_attention_batch([SegmentRows(start, len(tokens), pages)], self._page_size)
        return self.drafter.extend(features, torch.tensor(tokens), batch)

    def rows(self, pages: list[int], count: int) -> Tensor:
        return self.pool.data[pages].movedim(3, 1).flatten(0, 1)[:count]


def request(bench: Bench, length: int, seed: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    width = len(bench.layer.feature_layers) * bench.layer.config.target_hidden_size
    features = torch.randn(length, width, generator=generator)
    return features, torch.randint(0, 259, (length,), generator=generator).tolist()


def three_roots(bench: Bench, shape: TreeShape) -> tuple[list[GrowthRoot], list[Tensor], list[DraftTree]]:
    """Roots of three lengths, the drafter's output at each, and the trees that a naive growth gives them."""
    roots, outputs, expected = [], [], []
    for seed, length in enumerate((1, 4, 11)):
        features, tokens = request(bench, length, seed)
        pages = bench.pages(length + 1)
        outputs.append(bench.extend(features, tokens, pages)[-1])
        roots.append(GrowthRoot(tokens[-1], length, pages))
        expected.append(naive_tree(bench.naive, features, tokens, shape))
    return roots, outputs, expected


@pytest.mark.parametrize(("shape", "page_size"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(DraftHeadKind))
@pytest.mark.parametrize("at_once", [True, False])
@torch.inference_mode()
def test_trees_are_those_of_a_naive_growth(
    world: TinyWorld, kind: DraftHeadKind, shape: TreeShape, page_size: int, at_once: bool
) -> None:
    """CASES S33 and contract 5: three roots at once, scratch for two of them; nothing but scratch is written."""
    path = world.eagle if kind is DraftHeadKind.EAGLE else world.eagle3
    bench = Bench(world, path, shape, page_size, max_trees=2, at_once=at_once)
    roots, outputs, expected = three_roots(bench, shape)
    before = bench.pool.data[: bench.pool.num_pages].clone()
    trees = bench.drafter.grow(torch.stack(outputs), roots)
    assert trees == expected
    assert all(tree.num_nodes == shape.nodes for tree in trees)
    after = bench.pool.data[: bench.pool.num_pages]
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    alone = [bench.drafter.grow(output.unsqueeze(0), [root])[0] for output, root in zip(outputs, roots, strict=True)]
    assert alone == trees, "company changes nothing"


@pytest.mark.parametrize("sizes", [0, 4], ids=["as-many", "padded"])
@pytest.mark.parametrize(("shape", "page_size"), SHAPES, ids=str)
@torch.inference_mode()
def test_trees_grown_on_the_device_are_the_same(world: TinyWorld, shape: TreeShape, page_size: int, sizes: int) -> None:
    """What a GPU does, with the torch references: no value asked of the device on the way; padding changes nothing."""
    bench = Bench(world, world.eagle3, shape, page_size, max_trees=4, at_once=False)
    if sizes:
        bench.drafter.capture_growth(sizes, torch.float32, CPU)
    roots, outputs, expected = three_roots(bench, shape)
    before = bench.pool.data[: bench.pool.num_pages].clone()
    assert bench.drafter._grow_on_device(torch.stack(outputs), roots) == expected
    assert bench.drafter._grow_on_device(outputs[1].unsqueeze(0), roots[1:2]) == expected[1:2]
    after = bench.pool.data[: bench.pool.num_pages]
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize("kind", list(DraftHeadKind))
@torch.inference_mode()
def test_extending_in_parts_is_extending_at_once(world: TinyWorld, kind: DraftHeadKind) -> None:
    """Outputs near those of the naive head, and the very same bits in one go or in parts."""
    path = world.eagle if kind is DraftHeadKind.EAGLE else world.eagle3
    bench = Bench(world, path, TreeShape(3, 1, 4), 4)
    features, tokens = request(bench, 13, seed=5)
    whole, parts = bench.pages(13), bench.pages(13)
    at_once = bench.extend(features, tokens, whole)
    in_parts = [
        bench.extend(features[start:end], tokens[start:end], parts, start)
        for start, end in ((0, 1), (1, 5), (5, 8), (8, 13))
    ]
    naive = bench.naive.outputs(bench.naive.fuse(features), tokens)
    torch.testing.assert_close(at_once, naive, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(in_parts), at_once)
    assert torch.equal(bench.rows(whole, 13), bench.rows(parts, 13))


@pytest.mark.parametrize("at_once", [True, False])
@torch.inference_mode()
def test_a_branching_beyond_the_vocabulary_takes_what_there_is(world: TinyWorld, tmp_path: Path, at_once: bool) -> None:
    """CASES S33: K = 8 of a draft vocabulary of 3."""
    path = write_tiny_head(tmp_path, world.plain.path, kind=DraftHeadKind.EAGLE3, draft_vocab=3)
    bench = Bench(world, path, TreeShape(2, 8, 40), 4, at_once=at_once)
    features, tokens = request(bench, 6, seed=1)
    pages = bench.pages(7)
    tree = bench.drafter.grow(bench.extend(features, tokens, pages)[-1:], [GrowthRoot(tokens[-1], 6, pages)])[0]
    assert tree.num_nodes == 1 + 3 + 9
    assert set(tree.tokens[1:]) == {0, 86, 172}


@torch.inference_mode()
def test_no_draft_past_the_context(world: TinyWorld, tmp_path: Path) -> None:
    """CASES S28: a root too near the end gets no drafts; its neighbours in the same call do."""
    path = write_tiny_head(tmp_path, world.plain.path, context=16)
    bench = Bench(world, path, TreeShape(3, 1, 4), 4)
    roots, outputs = [], []
    for length in (12, 13, 5, 20):
        features, tokens = request(bench, length, seed=length)
        pages = bench.pages(length + 1)
        outputs.append(bench.extend(features, tokens, pages)[-1])
        roots.append(GrowthRoot(tokens[-1], length, pages))
    trees = bench.drafter.grow(torch.stack(outputs), roots)
    assert [tree.num_nodes for tree in trees] == [4, 1, 4, 1]
    assert [tree.tokens[0] for tree in trees] == [root.bonus_token for root in roots]


@pytest.mark.parametrize(
    ("shape", "page_size", "max_trees", "pages"),
    [
        (TreeShape(1, 8, 9), 4, 5, 0),
        (TreeShape(1, 1, 1), 4, 5, 0),
        (TreeShape(3, 1, 4), 1, 5, 10),
        (TreeShape(3, 1, 4), 4, 5, 10),
        (TreeShape(4, 2, 8), 16, 3, 6),
    ],
)
def test_scratch_holds_a_partial_page_and_every_row(
    shape: TreeShape, page_size: int, max_trees: int, pages: int
) -> None:
    assert scratch_pages_for(shape, page_size, max_trees) == pages
