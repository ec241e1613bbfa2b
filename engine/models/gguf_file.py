"""The container of GGUF files: metadata, and tensors by their GGUF names, dequantised on demand.

Reads the header itself: the `gguf` package's reader builds an array per string and takes seconds on a
vocabulary; its dequantisers are used. Format: the GGUF specification, versions 2 and 3, little endian.
Knows nothing about models.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from torch import Tensor

from graftline.engine.models.gguf_blocks import dequantise
from graftline.errors import InvalidRequestError

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_COUNT = struct.Struct("<Q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file; `shape` in torch's order (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    num_bytes: int


class _Cursor:
    """Reads values one after the other; running off the end is a ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, layout: struct.Struct) -> Any:
        end = self.position + layout.size
        if end > len(self._data):
            raise ValueError("the file ends inside its header")
        (value,) = layout.unpack_from(self._data, self.position)
        self.position = end
        return value

    def string(self) -> str:
        length = self.scalar(_COUNT)
        end = self.position + length
        if end > len(self._data):
            raise ValueError("the file ends inside its header")
        value = self._data[self.position : end]
        self.position = end
        return value.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, length = self.scalar(_U32), self.scalar(_COUNT)
            return self._array(item_kind, length)
        if kind not in _SCALARS:
            raise ValueError(f"metadata of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"a metadata array of unknown type {kind}")
        item = _SCALARS[kind]
        end = self.position + length * item.size
        if end > len(self._data):
            raise ValueError("the file ends inside its header")
        values = struct.unpack_from(f"<{length}{item.format[1:]}", self._data, self.position)
        self.position = end
        return list(values)


class GgufFile:
    """One open GGUF file, mapped into memory.

    Raises:
        InvalidRequestError: unreadable, not GGUF, a version other than 2 or 3, truncated, or quantised in a way
            this build cannot undo.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InvalidRequestError("model", f"cannot read {path}: {error}") from error
        try:
            self.metadata, self.tensors, self.header_bytes = _read_header(self._data)
        except ValueError as error:
            raise InvalidRequestError("model", f"{path} is no readable GGUF file: {error}") from error

    def tensor(self, name: str) -> Tensor:
        """The tensor as float32, or bfloat16 where the file holds that; a copy.

        Raises:
            KeyError: no such tensor.
            InvalidRequestError: quantised in a way that the `gguf` package cannot undo.
        """
        entry = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        try:
            return dequantise(raw, entry.kind, entry.shape)
        except NotImplementedError as error:
            raise InvalidRequestError("model", f"{self.path}: tensor {name}: {error}") from error

    def raw(self, start: int, length: int) -> bytes:
        """Bytes of the file, for hashing."""
        return self._data[start : start + length]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._data)


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError("its first bytes are not 'GGUF'")
    cursor.position = 4
    version = cursor.scalar(_U32)
    if version not in (2, 3):
        raise ValueError(f"version {version}, known are 2 and 3 (little endian)")
    num_tensors, num_fields = cursor.scalar(_COUNT), cursor.scalar(_COUNT)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        tensor = GgufTensor(name, shape, kind, start + offset, _tensor_bytes(name, shape, kind))
        if tensor.offset + tensor.num_bytes > len(data):
            raise ValueError(f"the file ends before tensor {name}")
        tensors[name] = tensor
    return metadata, tensors, cursor.position


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar(_U32)
    if num_dims > 4:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(cursor.scalar(_COUNT) for _ in range(num_dims))
    return name, shape[::-1], cursor.scalar(_U32), cursor.scalar(_COUNT)


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    try:
        block, block_bytes = cast(tuple[int, int], gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)])
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name} has unknown type {kind}") from None
    count = 1
    for size in shape:
        count *= size
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {shape} does not divide into blocks of {block}")
    return count // block * block_bytes
