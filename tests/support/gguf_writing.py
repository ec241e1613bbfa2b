"""Writes Hugging Face style tensors as GGUF files, the way llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from graftline.engine.models.gguf_config import gguf_name


def interleave_rope(rows: Tensor, num_heads: int) -> Tensor:
    """The converter's permutation of q and k: halves of each head become neighbours."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    heads: tuple[int, int] = (1, 1),
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a file of `architecture` with metadata `fields`; q and k of "llama" are permuted.

    Args:
        heads: query heads and KV heads.
        kind: of the matrices; vectors stay float32.
        extra: tensors that go in under their GGUF names as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add_field(writer, name, value)
    for name, tensor in tensors.items():
        value = tensor.float()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = interleave_rope(value, heads[".k_proj." in name])
        stored = kind if value.dim() == 2 else gguf.GGMLQuantizationType.F32
        add_tensor(writer, gguf_name(name), value, stored)
    for name, tensor in (extra or {}).items():
        add_tensor(writer, name, tensor, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, value: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, value.numpy().astype(np.float32))
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, value.numpy().astype(np.float16))
    elif kind == gguf.GGMLQuantizationType.BF16:
        raw = value.to(torch.bfloat16).view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quantize(value.numpy().astype(np.float32), kind), raw_dtype=kind)


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)
