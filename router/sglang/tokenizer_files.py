"""A served model's tokenizer as the files a Hugging Face directory has, zipped: what gateways ask a worker for."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from graftline.errors import InternalError
from graftline.proto.v1.common_pb2 import ModelCard

CHUNK_BYTES = 1 << 20


def tokenizer_files(card: ModelCard) -> dict[str, bytes]:
    """Contents by file name."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": card.context_length,
        "clean_up_tokenization_spaces": False,
        **card.special_tokens,
    }
    if card.chat_template:
        config["chat_template"] = card.chat_template
    return {"tokenizer.json": card.tokenizer_json, "tokenizer_config.json": msgspec.json.encode(config)}


def write_missing(directory: Path, files: dict[str, bytes]) -> None:
    """Leaves files alone that are there.

    Raises:
        InternalError: it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)
    except OSError as error:
        raise InternalError(f"tokenizer files for gateways: {error}") from error


def zipped(files: dict[str, bytes]) -> bytes:
    """One archive; equal files make equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(archive: bytes) -> Iterator[tuple[bytes, str]]:
    """Pieces of it, the last one with the hash of the whole (hex SHA-256), the others with an empty one."""
    for start in range(0, len(archive), CHUNK_BYTES):
        piece = archive[start : start + CHUNK_BYTES]
        is_last = start + CHUNK_BYTES >= len(archive)
        yield piece, hashlib.sha256(archive).hexdigest() if is_last else ""
