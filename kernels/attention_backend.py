"""Chooses how a stage computes attention of its planned steps, once, where its models are built.

Rounds of fixed shape (`TreeBatch`) take the Triton kernel on CUDA whatever is chosen: they are captured in CUDA graphs,
and a plan made on the host cannot be.
"""

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from graftline.errors import InvalidRequestError
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.attention_kind import AttentionBackend
from graftline.kernels.tree_batch import TreeBatch

logger = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS = frozenset({64, 128, 256})
"""Its FA2 kernels stride shared memory by 128 bytes; 80 and 96 would read beside the rows."""


class Attention(Protocol):
    """One way to compute `graftline.kernels.attention.paged_attention`, with its arguments and errors."""

    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch, scale: float, /
    ) -> Tensor:
        """[rows, heads, head_dim]."""


def choose_attention(
    wanted: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionBackend, Attention]:
    """The way that `settle_backend` settles on, ready to run on `device`.

    Raises:
        InvalidRequestError: see `settle_backend`.
    """
    settled = settle_backend(wanted, device, dtype, head_dim)
    logger.info("attention of planned steps on %s: %s", device, settled.value)
    if settled is AttentionBackend.FLASHINFER:
        from graftline.kernels.attention_flashinfer import FlashInferAttention

        return settled, FlashInferAttention(device)
    if settled is AttentionBackend.TORCH and device.type == "cuda":
        from graftline.kernels.attention_torch import torch_attention

        return settled, torch_attention
    return settled, paged_attention


def settle_backend(
    wanted: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """What a choice means on this machine; never AUTO.

    flashinfer has no float32 kernels and none for other head sizes than `FLASHINFER_HEAD_DIMS`: such models take
    Triton, also when flashinfer was asked for, and the log says so.

    Raises:
        InvalidRequestError: what was asked for by name cannot run here; says why.
    """
    if device.type != "cuda":
        if wanted in (AttentionBackend.FLASHINFER, AttentionBackend.TRITON):
            raise InvalidRequestError("attention_backend", f"{wanted.value} needs a CUDA device, not {device}")
        return AttentionBackend.TORCH
    if wanted in (AttentionBackend.TRITON, AttentionBackend.TORCH):
        return wanted
    if dtype != torch.bfloat16 or head_dim not in FLASHINFER_HEAD_DIMS:
        if wanted is AttentionBackend.FLASHINFER:
            logger.warning("flashinfer serves no %s heads of %d: triton does", dtype, head_dim)
        return AttentionBackend.TRITON
    trouble = flashinfer_trouble()
    if trouble is None:
        return AttentionBackend.FLASHINFER
    if wanted is AttentionBackend.FLASHINFER:
        raise InvalidRequestError("attention_backend", f"flashinfer: {trouble}")
    logger.info("no flashinfer: %s", trouble)
    return AttentionBackend.TRITON


def flashinfer_trouble() -> str | None:
    """Why flashinfer cannot be used on this machine, or None. It compiles its kernels here, at first use."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if _nvcc() is None:
        return "it compiles its kernels and there is no nvcc (CUDA_HOME, PATH, /usr/local/cuda)"
    if shutil.which("ninja") is None:
        return "it compiles its kernels and there is no ninja"
    try:
        importlib.import_module("flashinfer.prefill")
    except Exception as error:  # whatever a broken installation raises
        return f"its import failed: {type(error).__name__}: {error}"
    return None


def _nvcc() -> str | None:
    """Where flashinfer would look for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(str(Path(home, "bin", "nvcc")))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
