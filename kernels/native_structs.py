"""The structs that cross into the C library; each mirrors one of native/parts.h."""

import ctypes

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class NativeWeight(ctypes.Structure):
    """`Weight`: a packed matrix."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )


class NativeBatch(ctypes.Structure):
    """`Batch`: an AttentionBatch, whose tensors must outlive this."""

    _fields_ = (
        ("row_segment", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("segment_rows", ctypes.c_void_p),
        ("segment_start", ctypes.c_void_p),
        ("page_tables", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("is_chain", ctypes.c_int64),
        ("skipped", ctypes.c_int64),
    )


class NativePages(ctypes.Structure):
    """`Pages`: K and V of one layer."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )


class NativeLayer(ctypes.Structure):
    """`Layer`: the weights of one decoder layer."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("qkv", ctypes.POINTER(NativeWeight)),
        ("output", ctypes.POINTER(NativeWeight)),
        ("gate_up", ctypes.POINTER(NativeWeight)),
        ("down", ctypes.POINTER(NativeWeight)),
    )


class NativeLayers(ctypes.Structure):
    """`Layers`: a range of decoder layers."""

    _fields_ = (
        ("layers", ctypes.POINTER(NativeLayer)),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("inter", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class NativeDraft(ctypes.Structure):
    """`Draft`: a draft head."""

    _fields_ = (
        ("embedding", ctypes.POINTER(NativeWeight)),
        ("fusion", ctypes.POINTER(NativeWeight)),
        ("qkv", ctypes.POINTER(NativeWeight)),
        ("output", ctypes.POINTER(NativeWeight)),
        ("gate_up", ctypes.POINTER(NativeWeight)),
        ("down", ctypes.POINTER(NativeWeight)),
        ("head", ctypes.POINTER(NativeWeight)),
        ("input_norm", ctypes.c_void_p),
        ("feature_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("target_ids", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        ("embed_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("inter", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("position_offset", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class NativeTrees(ctypes.Structure):
    """`Trees`: what to grow, and where the result goes."""

    _fields_ = (
        ("outputs", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("page_tables", ctypes.c_void_p),
        ("trees", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("num_drafts", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
    )


def native_type(dtype: torch.dtype) -> int:
    """The C library's number of a type."""
    return _TYPES[dtype]


def native_weight(
    data: Tensor, scale: Tensor | None, bias: Tensor | None, in_features: int, out_features: int
) -> NativeWeight:
    """Describes a packed weight."""
    return NativeWeight(
        data.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        in_features,
        out_features,
        _TYPES[data.dtype],
    )


def native_batch(batch: AttentionBatch) -> NativeBatch:
    """Describes a batch."""
    return NativeBatch(
        batch.row_segment.data_ptr(),
        batch.positions.data_ptr(),
        batch.parents.data_ptr(),
        batch.segment_rows.data_ptr(),
        batch.segment_start.data_ptr(),
        batch.page_tables.data_ptr(),
        batch.num_rows,
        batch.num_segments,
        batch.page_tables.shape[1],
        batch.page_size,
        batch.is_chain,
        0,
    )


def native_pages(k_pages: Tensor, v_pages: Tensor) -> NativePages:
    """Describes the pages of one layer; both views must have the same strides."""
    return NativePages(
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_pages.stride(0),
        k_pages.shape[2],
        k_pages.shape[3],
        _TYPES[k_pages.dtype],
    )
