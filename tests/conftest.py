"""Without a GPU, Triton kernels run under the interpreter; the variable must stand before any test imports a kernel."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
