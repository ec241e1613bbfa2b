"""Checks that several ops share."""

import torch
from torch import Tensor


def check_rows(name: str, x: Tensor) -> None:
    """Raises ValueError unless x is [rows, ...] with each row contiguous, in float32 on CPU."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if stride != expected and size != 1:
            raise ValueError(
                f"{name}: strides {x.stride()} of {tuple(x.shape)}: only the first dimension may be strided"
            )
        expected *= size
    if x.device.type == "cpu" and x.dtype != torch.float32:
        raise ValueError(f"{name}: {x.dtype} on CPU, where activations are float32")
