"""Causal depthwise convolution with SiLU over the path of every row, and the windows of inputs it leaves behind."""

from ctypes import byref

import torch
from torch import Tensor
from torch.nn.functional import silu

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import native_type
from graftline.kernels.state_rows import StateRows, native_state_rows

MAX_WIDTH = 8


def causal_conv(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, node_windows: Tensor | None) -> Tensor:
    """silu(sum of weight[j] * input j of the row's path), and the windows behind the rows.

    The path of a row is the slot's window, then the row's ancestors, then the row. Inputs are rounded to the type of
    the windows before anything else, so that it makes no difference where a chunk ends.

    Args:
        x: [rows, channels] inputs; rows may be strided. float32 on CPU.
        weight: [width, channels], the oldest tap first; type of x.
        windows: [slots, width - 1, channels], the oldest input first; slots may be strided. Moved on behind a chunk's
            last row, behind a tree's root.
        node_windows: [slots, nodes, width - 1, channels]: gets the window behind node i of a tree at i - 1; None when
            it is not wanted.

    Returns:
        [rows, channels] contiguous, type of x.

    Raises:
        ValueError: shapes, types or strides that do not fit.
    """
    _check(x, weight, windows, rows, node_windows)
    if x.is_cuda:
        from graftline.kernels.causal_conv_triton import causal_conv as kernel

        return kernel(x, weight, windows, rows, node_windows)
    if native_library() is None:
        return causal_conv_reference(x, weight, windows, rows, node_windows)
    out = torch.empty(x.shape)
    _run_native(x, weight, windows, rows, node_windows, out)
    return out


def move_windows(x: Tensor, windows: Tensor, rows: StateRows) -> None:
    """Moves the windows of chunks on behind their last rows, as `causal_conv` does, without computing anything."""
    weight = torch.zeros(windows.shape[1] + 1, windows.shape[2], dtype=x.dtype, device=x.device)
    _check(x, weight, windows, rows, None)
    if x.is_cuda:
        from graftline.kernels.causal_conv_triton import move_windows as kernel

        kernel(x, windows, rows)
    elif native_library() is not None:
        _run_native(x, weight, windows, rows, None, None)
    else:
        causal_conv_reference(x, weight, windows, rows, None)


def _run_native(
    x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, node_windows: Tensor | None, out: Tensor | None
) -> None:
    library = native_library()
    assert library is not None
    x = x if windows.dtype == torch.float32 else x.to(windows.dtype).float()
    library.gl_causal_conv(
        byref(native_state_rows(rows)),
        x.data_ptr(),
        x.stride(0),
        x.shape[1],
        weight.shape[0],
        weight.data_ptr(),
        windows.data_ptr(),
        windows.stride(0),
        None if node_windows is None else node_windows.data_ptr(),
        0 if node_windows is None else node_windows.stride(0),
        0 if node_windows is None else node_windows.stride(1),
        native_type(windows.dtype),
        None if out is None else out.data_ptr(),
        num_threads(x.numel() // 8192),
    )


def causal_conv_reference(
    x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, node_windows: Tensor | None
) -> Tensor:
    """The specification, row by row."""
    width = weight.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rounded = x.to(windows.dtype)
    parents = rows.parents.tolist()
    for first, count, slot, is_tree in rows.segments:
        behind: list[Tensor] = []  # the window behind every row
        for row in range(count):
            parent = parents[first + row]
            before = windows[slot] if parent < 0 else behind[parent]
            taps = torch.cat((before, rounded[first + row].unsqueeze(0)))  # [width, channels]
            out[first + row] = silu((taps.float() * weight.float()).sum(0)).to(x.dtype)
            behind.append(taps[-(width - 1) :].clone())
        windows[slot] = behind[0] if is_tree else behind[-1]
        if is_tree and node_windows is not None:
            for row in range(1, count):
                node_windows[slot, row - 1] = behind[row]
    return out


def _check(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, node_windows: Tensor | None) -> None:
    channels, width = x.shape[1], weight.shape[0]
    if x.dim() != 2 or x.shape[0] != rows.num_rows or weight.shape != (width, channels):
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} for {rows.num_rows} rows")
    if not 2 <= width <= MAX_WIDTH or not weight.is_contiguous() or weight.dtype != x.dtype:
        raise ValueError(f"weight: {weight.dtype} {tuple(weight.shape)}, not contiguous with 2 to {MAX_WIDTH} taps")
    check_rows("x", x)
    for name, data, lead in (("windows", windows, 1), ("node_windows", node_windows, 2)):
        if data is None:
            continue
        if data.shape[lead:] != (width - 1, channels) or data.stride()[lead:] != (channels, 1):
            raise ValueError(f"{name}: {tuple(data.shape)} with strides {data.stride()} for {width} taps of {channels}")
        if data.dtype not in (torch.float32, torch.bfloat16) or data.dtype != windows.dtype:
            raise ValueError(f"{name}: {data.dtype}")
    if node_windows is not None and node_windows.shape[1] < rows.max_tree_rows - 1:
        raise ValueError(f"node_windows: {node_windows.shape[1]} nodes for trees of {rows.max_tree_rows}")
