"""Without a GPU, Triton kernels run under the interpreter; the variable must stand before a kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
