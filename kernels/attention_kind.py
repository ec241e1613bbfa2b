"""Names of the ways to compute attention; free of torch, so that a command line can offer them."""

from enum import Enum


class AttentionBackend(Enum):
    """AUTO: flashinfer on CUDA where it can be built and serves the model, else Triton; torch on CPU.

    TORCH means the native library on CPU, and plain torch operations on CUDA, which are slow.
    """

    AUTO = "auto"
    FLASHINFER = "flashinfer"
    TRITON = "triton"
    TORCH = "torch"
