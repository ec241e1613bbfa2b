"""Dequantisers for the commonest GGUF block formats, several times faster than the `gguf` package's.

They give the same bits as it (the tests compare); every other format goes through the package.
"""

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 32


def dequantise(raw: npt.NDArray[np.uint8], kind: int, shape: tuple[int, ...]) -> Tensor:
    """Values of a tensor stored as GGUF blocks along its last dimension.

    Args:
        raw: the tensor's bytes, flat.
        kind: the GGUF tensor type; any that `gguf` can undo.

    Returns:
        float32 `shape`, its own memory; bfloat16 where the file holds that.

    Raises:
        NotImplementedError: the package cannot undo this format.
    """
    match gguf.GGMLQuantizationType(kind):
        case gguf.GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32).copy()).reshape(shape)
        case gguf.GGMLQuantizationType.F16:
            return torch.from_numpy(raw.view(np.float16).astype(np.float32)).reshape(shape)
        case gguf.GGMLQuantizationType.BF16:
            return torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(shape)
        case gguf.GGMLQuantizationType.Q8_0:
            blocks = torch.from_numpy(raw.copy()).reshape(-1, 2 + _BLOCK)
            return _scale(blocks[:, :2]).mul(blocks[:, 2:].view(torch.int8)).reshape(shape)
        case gguf.GGMLQuantizationType.Q4_0:
            blocks = torch.from_numpy(raw.copy()).reshape(-1, 2 + _BLOCK // 2)
            quants = _nibbles(blocks[:, 2:]).view(torch.int8).sub_(8)
            return _scale(blocks[:, :2]).mul(quants).reshape(shape)
        case gguf.GGMLQuantizationType.Q4_1:
            blocks = torch.from_numpy(raw.copy()).reshape(-1, 4 + _BLOCK // 2)
            product = _scale(blocks[:, :2]).mul(_nibbles(blocks[:, 4:]))
            return product.add_(_scale(blocks[:, 2:4])).reshape(shape)
        case other:
            rows = raw.reshape(*shape[:-1], -1)
            return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(rows, other))).reshape(shape)


def _scale(halves: Tensor) -> Tensor:
    """One float16 a block, as float32: [blocks, 2] bytes -> [blocks, 1]."""
    return halves.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of all 16 bytes, then the high ones: [blocks, 16] -> [blocks, 32]."""
    return torch.cat((packed & 15, packed >> 4), dim=1)
