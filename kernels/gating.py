"""Sigmoid gates, and the choice of experts in a mixture."""

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate).

    Args:
        x: [rows, columns]; rows may be strided.
        gate: [rows, columns] or [rows, 1], type of x; rows may be strided.

    Returns:
        [rows, columns] contiguous, type of x.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, columns = x.shape
    if gate.shape not in ((rows, columns), (rows, 1)):
        raise ValueError(f"gate {tuple(gate.shape)} for x {tuple(x.shape)}")
    check_rows("x", x)
    check_rows("gate", gate)
    if x.is_cuda:
        from graftline.kernels.gating_triton import sigmoid_mul as kernel

        return kernel(x, gate)
    library = native_library()
    if library is None:
        return sigmoid_mul_reference(x, gate)
    out = torch.empty(rows, columns)
    library.gl_sigmoid_mul(
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        gate.shape[1],
        rows,
        columns,
        out.data_ptr(),
        num_threads(out.numel() // 16384),
    )
    return out


def sigmoid_mul_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The specification: arithmetic in float32, one rounding at the end."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def route(logits: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of every row; ties go to the lower id.

    Args:
        logits: [rows, experts], contiguous.
        num_chosen: experts a row, 1 <= num_chosen <= experts.
        normalise: the weights of a row sum to 1; otherwise they are parts of the softmax over all experts.

    Returns:
        ([rows, num_chosen] float32 weights, [rows, num_chosen] int64 ids), the likeliest first.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() != 2 or not logits.is_contiguous() or not 1 <= num_chosen <= logits.shape[1]:
        raise ValueError(f"num_chosen: {num_chosen} of logits {tuple(logits.shape)}")
    library = native_library() if logits.device.type == "cpu" else None
    if library is None:
        return route_reference(logits, num_chosen, normalise)
    check_rows("logits", logits)
    rows, experts = logits.shape
    weights, ids = torch.empty(rows, num_chosen), torch.empty(rows, num_chosen, dtype=torch.int64)
    threads = num_threads(logits.numel() // 16384)
    library.gl_route(
        logits.data_ptr(), rows, experts, num_chosen, int(normalise), weights.data_ptr(), ids.data_ptr(), threads
    )
    return weights, ids


def route_reference(logits: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The specification, in float32."""
    ordered, ids = torch.sort(logits.float().softmax(-1), dim=-1, descending=True, stable=True)
    weights, ids = ordered[:, :num_chosen], ids[:, :num_chosen].contiguous()
    return weights / weights.sum(-1, keepdim=True) if normalise else weights.contiguous(), ids
