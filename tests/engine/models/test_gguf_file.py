"""The GGUF container: values as the package reads them, and damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_writing import add_field, add_tensor

from graftline.engine.models.gguf_blocks import dequantise
from graftline.engine.models.gguf_file import GgufFile
from graftline.errors import InvalidRequestError

Kind = gguf.GGMLQuantizationType
FIELDS = {
    "a.bool": True,
    "a.int": 70000,
    "a.float": 0.5,
    "a.text": "héllo",
    "a.ints": [1, -2],
    "a.texts": ["x", "", "世"],
}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "some.gguf", "llama")
    for name, value in FIELDS.items():
        add_field(writer, name, value)
    add_tensor(writer, "vector", values(7), Kind.F32)
    add_tensor(writer, "half", values(3, 5), Kind.F16)
    add_tensor(writer, "brain", values(3, 6), Kind.BF16)
    add_tensor(writer, "quantised", values(4, 64), Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "some.gguf"


def test_metadata_and_tensors(path: Path) -> None:
    file = GgufFile(path)
    assert {name: file.metadata[name] for name in FIELDS} == FIELDS
    assert torch.equal(file.tensor("vector"), values(7))
    assert torch.equal(file.tensor("half"), values(3, 5).half().float())
    assert torch.equal(file.tensor("brain"), values(3, 6).bfloat16())
    assert file.tensor("quantised").shape == (4, 64)
    with pytest.raises(KeyError):
        file.tensor("absent")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_values_have_the_bits_of_the_package(kind: Kind) -> None:
    original = (values(6, 96) * 5).numpy()
    blocks = gguf.quantize(original, kind)
    ours = dequantise(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1), kind, (6, 96))
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), gguf.dequantize(blocks, kind))
    assert np.abs(ours.numpy() - original).max() < 1.5


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_every_bit_pattern_of_a_block(kind: Kind) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, size=(200, block_bytes), dtype=np.uint8)
    raw[:, 1] &= 0x3B  # keep the float16 scales finite
    raw[:, 3] &= 0x3B
    expected = gguf.dequantize(raw, kind).reshape(-1)
    assert np.array_equal(dequantise(raw.reshape(-1), kind, (200 * 32,)).numpy(), expected)


def test_tensors_are_copies(path: Path) -> None:
    file = GgufFile(path)
    file.tensor("vector").zero_()
    assert torch.equal(file.tensor("vector"), values(7))


def test_every_truncation_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    lengths = [*range(0, 400, 7), len(content) - 20]  # 16 bytes of padding follow the last tensor
    for length in lengths:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:length])
        with pytest.raises(InvalidRequestError, match=r"cut\.gguf"):
            GgufFile(cut)


def test_damage_is_refused_with_its_reason(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for position, patch, reason in (
        (0, b"GGML", "first bytes"),
        (4, struct.pack("<I", 9), "version 9"),
        (8, struct.pack("<Q", 1 << 60), "dimensions"),
        (24, struct.pack("<Q", 1 << 62), "ends inside its header"),
        (content.index(b"a.int") + 5, struct.pack("<I", 77), "unknown type 77"),
        (content.index(b"a.ints") + 6 + 8, struct.pack("<Q", 1 << 61), "ends inside its header"),
        (content.index(b"a.ints") + 6 + 4, struct.pack("<I", 9), "array of unknown type 9"),
        (content.index(b"vector") + 6 + 4 + 8, struct.pack("<I", 250), "vector has unknown type 250"),
        (content.index(b"half") + 4, struct.pack("<I", 99), "99 dimensions"),
        (content.index(b"half") + 8, struct.pack("<Q", 1 << 40), "ends before tensor"),
        (content.index(b"quantised") + 9 + 4, struct.pack("<Q", 33), "blocks of 32"),
    ):
        damaged.write_bytes(content[:position] + patch + content[position + len(patch) :])
        with pytest.raises(InvalidRequestError, match=reason):
            GgufFile(damaged)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        GgufFile(tmp_path / "absent.gguf")
