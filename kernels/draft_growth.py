"""Growing draft trees in one native call (CPU): all levels of the draft layer, its choices and the best nodes.

Serves the two public layouts of draft heads: EAGLE (fc over [embedding, feature], then one decoder layer; Li et al.
2024) and EAGLE-3 (a decoder layer over [norm(embedding), norm(feature)]; Li et al. 2025). `engine/drafter.py` grows the
same trees from single ops; a test compares the two.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.kv_write import check_pages
from graftline.kernels.linear import LinearWeight
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import NativeDraft, NativeTrees, native_pages


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Parameters of a draft head with one decoder layer. Norms are float32.

    Attributes:
        embedding: [vocabulary, embed_size].
        fusion: EAGLE: embed_size + hidden -> hidden; None for EAGLE-3.
        input_norm: EAGLE-3: [embed_size], of the embedding; EAGLE: [hidden] of the fused input, or None.
        feature_norm: EAGLE-3: [hidden], of the feature; None for EAGLE.
        qkv: (EAGLE-3: embed_size + hidden, EAGLE: hidden) -> (heads + 2 * kv_heads) * head_dim.
        output: heads * head_dim -> hidden.
        post_norm: [hidden].
        gate_up: hidden -> 2 * inter.
        down: inter -> hidden.
        final_norm: [hidden] before the head, or None.
        head: hidden -> draft vocabulary.
        target_ids: [draft vocabulary] int64 ids in the vocabulary, or None when both are the same.
    """

    embedding: LinearWeight
    fusion: LinearWeight | None
    input_norm: Tensor | None
    feature_norm: Tensor | None
    qkv: LinearWeight
    output: LinearWeight
    post_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight
    final_norm: Tensor | None
    head: LinearWeight
    target_ids: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Heads and positions of a draft layer.

    Attributes:
        eps: of all norms.
        scale: of attention scores.
        position_offset: added to a row's position for its rotation.
        cos: [max_positions, rotated / 2] float32.
        sin: likewise.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    position_offset: int
    cos: Tensor
    sin: Tensor


class DraftGrowth:
    """A draft head ready to grow trees natively.

    Raises:
        ValueError: weights that do not fit each other, or not packed for the C library; ask `is_available` first.
    """

    def __init__(self, weights: DraftWeights, shape: DraftShape) -> None:
        self._weights = weights
        self._shape = shape
        self._check()
        packed = [
            weights.embedding,
            weights.fusion,
            weights.qkv,
            weights.output,
            weights.gate_up,
            weights.down,
            weights.head,
        ]
        vectors = (weights.input_norm, weights.feature_norm, weights.post_norm, weights.final_norm, weights.target_ids)
        self._native = NativeDraft(
            *(None if w is None or w.native is None else ctypes.pointer(w.native) for w in packed),
            *(None if vector is None else vector.data_ptr() for vector in vectors),
            shape.cos.data_ptr(),
            shape.sin.data_ptr(),
            weights.output.out_features,
            weights.embedding.in_features,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            weights.down.in_features,
            shape.cos.shape[1],
            shape.position_offset,
            shape.eps,
            shape.scale,
        )

    @staticmethod
    def is_available(weights: DraftWeights) -> bool:
        """Whether these weights lie in the C library's form: on CPU, with a compiler at hand."""
        packed = (weights.embedding, weights.fusion, weights.qkv, weights.output, weights.gate_up, weights.down)
        return native_library() is not None and all(w is None or w.native is not None for w in (*packed, weights.head))

    def grow(
        self,
        outputs: Tensor,
        starts: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        depth: int,
        width: int,
        num_drafts: int,
    ) -> tuple[Tensor, Tensor]:
        """Grows one tree a root; writes KV behind every root's committed rows.

        Candidates are the `width` likeliest children of every node of a level's beam, and a beam is the `width` best
        candidates of its level by cumulative log-probability; ties go to the earlier one.

        Args:
            outputs: [trees, hidden] float32 output of every root's last final row.
            starts: committed rows of every root.
            page_tables: pages of every root, with room for start + (depth - 1) * width slots if depth is above 1.
            k_pages: the draft layer's, see `write_kv`.
            v_pages: likewise.
            depth: levels of drafts, at least 1.
            width: children a node, at most the draft vocabulary.
            num_drafts: nodes to keep besides the root, at most width + (depth - 1) * width ** 2.

        Returns:
            ([trees, num_drafts] int64 vocabulary ids, [trees, num_drafts] int64 parent nodes): nodes 1 … num_drafts
            best first, see `select_tree`; node 0 is the root.

        Raises:
            ValueError: arguments that do not fit.
        """
        trees, page_size = len(starts), k_pages.shape[1]
        check_rows("outputs", outputs)
        check_pages(k_pages, v_pages, page_size)
        candidates = width + (depth - 1) * width**2
        if depth < 1 or not 1 <= width <= self._weights.head.out_features or not 1 <= num_drafts <= candidates:
            raise ValueError(f"depth {depth}, width {width}, num_drafts {num_drafts} of {candidates} candidates")
        if outputs.shape != (trees, self._weights.output.out_features) or len(page_tables) != trees or not trees:
            raise ValueError(f"outputs {tuple(outputs.shape)}, {len(page_tables)} page tables for {trees} roots")
        if k_pages.shape[2:] != (self._shape.num_kv_heads, self._shape.head_dim):
            raise ValueError(f"k_pages: shape {tuple(k_pages.shape)}")
        for start, table in zip(starts, page_tables, strict=True):
            if not start >= 0 or start + depth + self._shape.position_offset > self._shape.cos.shape[0]:
                raise ValueError(f"starts: {start} is outside the {self._shape.cos.shape[0]} positions")
            slots = start + (depth - 1) * width if depth > 1 else 0
            if len(table) * page_size < slots or any(not 0 <= page < k_pages.shape[0] for page in table):
                raise ValueError(f"page_tables: {len(table)} pages for {start} rows and the growth behind them")
        library = native_library()
        assert library is not None
        max_pages = max(1, max(map(len, page_tables)))
        tables = torch.tensor([[*table, *[0] * (max_pages - len(table))] for table in page_tables], dtype=torch.int32)
        start_rows = torch.tensor(starts, dtype=torch.int64)
        outputs = outputs.contiguous()
        tokens = torch.empty((trees, num_drafts), dtype=torch.int64)
        parents = torch.empty((trees, num_drafts), dtype=torch.int64)
        native = NativeTrees(
            outputs.data_ptr(), start_rows.data_ptr(), tables.data_ptr(), trees, max_pages, page_size, depth, width,
            num_drafts, tokens.data_ptr(), parents.data_ptr(),
        )  # fmt: skip
        threads = num_threads(self._weights.head.data.numel() // 32768)
        if library.gl_grow_trees(byref(self._native), byref(native), byref(native_pages(k_pages, v_pages)), threads):
            raise MemoryError(f"no memory to grow {trees} trees")
        return tokens, parents

    def _check(self) -> None:
        weights, shape = self._weights, self._shape
        if not self.is_available(weights):
            raise ValueError("weights: not packed for the C library")
        hidden, embed, inter = weights.output.out_features, weights.embedding.in_features, weights.down.in_features
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        fused = weights.fusion is not None
        if not fused and (weights.input_norm is None or weights.feature_norm is None):
            raise ValueError("weights: EAGLE-3 needs input_norm and feature_norm")
        matrices = {
            "fusion": (weights.fusion, embed + hidden, hidden),
            "qkv": (weights.qkv, hidden if fused else embed + hidden, q_size + 2 * kv_size),
            "output": (weights.output, q_size, hidden),
            "gate_up": (weights.gate_up, hidden, 2 * inter),
            "down": (weights.down, inter, hidden),
            "head": (weights.head, hidden, weights.head.out_features),
        }
        for name, (matrix, num_inputs, num_outputs) in matrices.items():
            if matrix is not None and (matrix.in_features, matrix.out_features) != (num_inputs, num_outputs):
                raise ValueError(
                    f"{name} is {matrix.in_features} -> {matrix.out_features}, not {num_inputs} -> {num_outputs}"
                )
        norms = {
            "input_norm": (weights.input_norm, hidden if fused else embed),
            "feature_norm": (weights.feature_norm, hidden),
            "post_norm": (weights.post_norm, hidden),
            "final_norm": (weights.final_norm, hidden),
        }
        for name, (norm, size) in norms.items():
            if norm is not None and (norm.shape != (size,) or norm.dtype != torch.float32 or not norm.is_contiguous()):
                raise ValueError(f"{name} is {norm.dtype} {tuple(norm.shape)}, not float32 ({size},)")
        ids, vocabulary = weights.target_ids, weights.embedding.out_features
        if ids is None:
            if weights.head.out_features > vocabulary:
                raise ValueError(f"head: {weights.head.out_features} outputs for a vocabulary of {vocabulary}")
        elif ids.shape != (weights.head.out_features,) or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError(f"target_ids: {ids.dtype} {tuple(ids.shape)} for {weights.head.out_features} outputs")
        elif int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(f"target_ids: outside the vocabulary of {vocabulary}")
        for name, table in (("cos", shape.cos), ("sin", shape.sin)):
            if table.dtype != torch.float32 or not table.is_contiguous() or table.shape != shape.cos.shape:
                raise ValueError(f"{name}: {table.dtype} {tuple(table.shape)}")
