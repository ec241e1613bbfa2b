"""Inputs of a draft head's rows, gathered: features of a target, and EAGLE-3's [norm(embedding), norm(feature)]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.norm import rms_norm_reference

MAX_SOURCES = 4


def gather_columns(sources: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Some rows of several matrices, side by side: one launch on CUDA for up to `MAX_SOURCES` of them.

    Args:
        sources: [n, width] each, of one type; rows may be strided.
        rows: [r] int64.

    Returns:
        [r, len(sources) * width].

    Raises:
        ValueError: no source, or shapes or types that differ.
    """
    if not sources or any(source.shape != sources[0].shape or source.dtype != sources[0].dtype for source in sources):
        raise ValueError(f"sources: {[(source.dtype, tuple(source.shape)) for source in sources]} are not alike")
    for source in sources:
        check_rows("sources", source)
    if rows.is_cuda and len(sources) <= MAX_SOURCES:
        from graftline.kernels.draft_inputs_triton import gather_columns as kernel

        return kernel(sources, rows)
    return gather_columns_reference(sources, rows)


def gather_columns_reference(sources: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The specification."""
    return torch.cat([source[rows] for source in sources], dim=-1)


def draft_inputs(
    embedding: Tensor,
    token_ids: Tensor,
    embedding_norm: Tensor,
    feature: Tensor,
    rows: Tensor | None,
    feature_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """EAGLE-3's input of some rows (Li et al. 2025): one launch on CUDA.

    Args:
        embedding: [vocabulary, hidden].
        token_ids: [r] int64.
        embedding_norm: [hidden].
        feature: [n, hidden], contiguous.
        rows: [r] int64, the feature of every row; None where n is r, one after the other.
        feature_norm: [hidden].
        eps: of both norms.

    Returns:
        ([r, 2 * hidden] normed embedding, then normed feature; [r, hidden] the features).

    Raises:
        ValueError: shapes or types that do not fit.
    """
    hidden = embedding.shape[1]
    if feature.shape[1:] != (hidden,) or embedding_norm.shape != (hidden,) or feature_norm.shape != (hidden,):
        raise ValueError(
            f"feature {tuple(feature.shape)}, norms {tuple(embedding_norm.shape)} and {tuple(feature_norm.shape)} for "
            f"embeddings {tuple(embedding.shape)}"
        )
    if token_ids.shape != ((feature if rows is None else rows).shape[0],) or embedding.dtype != feature.dtype:
        raise ValueError(f"token_ids {tuple(token_ids.shape)}, {embedding.dtype} for features {feature.dtype}")
    if feature.is_cuda:
        from graftline.kernels.draft_inputs_triton import draft_inputs as kernel

        return kernel(embedding, token_ids, embedding_norm, feature.contiguous(), rows, feature_norm, eps)
    return draft_inputs_reference(embedding, token_ids, embedding_norm, feature, rows, feature_norm, eps)


def draft_inputs_reference(
    embedding: Tensor,
    token_ids: Tensor,
    embedding_norm: Tensor,
    feature: Tensor,
    rows: Tensor | None,
    feature_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The specification."""
    taken = feature if rows is None else feature[rows]
    normed = rms_norm_reference(embedding[token_ids], embedding_norm, eps)
    return torch.cat((normed, rms_norm_reference(taken, feature_norm, eps)), dim=-1), taken
