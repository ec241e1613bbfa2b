"""A model on disk: its config, its tensors by Hugging Face names, and what a router needs to know of it.

Hugging Face directories (safetensors) and GGUF files; for measurements also configs without weights. Tensors are read
when asked for, so a stage touches only its own layers.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from graftline.engine.models.card import ModelCardData
from graftline.engine.models.config import ModelConfig, read_config
from graftline.engine.models.dummy_checkpoint import DUMMY_FILE, DummyCheckpoint
from graftline.engine.models.gguf_checkpoint import GgufCheckpoint
from graftline.engine.models.hf_checkpoint import HfCheckpoint
from graftline.errors import InvalidRequestError


class Checkpoint(Protocol):
    """What every kind offers."""

    @property
    def path(self) -> Path:
        """The directory or file it was opened from."""

    @property
    def config(self) -> ModelConfig:
        """Shapes and constants."""

    @property
    def model_hash(self) -> str:
        """Equal for equal contents, wherever they lie; 32 hex digits."""

    @property
    def card(self) -> ModelCardData:
        """Tokenizer, template and ids.

        Raises:
            InvalidRequestError: there is no tokenizer, or one of an unsupported kind.
        """

    def has_tensor(self, name: str) -> bool:
        """Whether there is a parameter of that Hugging Face name."""

    def tensor(self, name: str) -> Tensor:
        """The parameter of that Hugging Face name, float32 or bfloat16, on the CPU unless it was drawn on a GPU. Treat
        it as read-only.

        Raises:
            InvalidRequestError: no such tensor, or stored in a type that is not supported.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face directory, a GGUF file, or a directory that holds exactly one GGUF file.

    A directory with `dummy.json` gives random weights; see `dummy_checkpoint`.

    Raises:
        InvalidRequestError: nothing there that can be served; says what was looked for.
    """
    if path.is_file() and path.suffix == ".gguf":
        return GgufCheckpoint(path, model_id=path.stem)
    if (path / DUMMY_FILE).is_file():
        return DummyCheckpoint(path)
    if (path / "config.json").is_file():
        return HfCheckpoint(path)
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GgufCheckpoint(found[0], model_id=path.resolve().name)
        raise InvalidRequestError("model", f"{path} holds no config.json and {len(found)} GGUF files, not one")
    raise InvalidRequestError("model", f"{path} is neither a directory nor a .gguf file")


def read_model_config(path: Path) -> ModelConfig:
    """The config alone; of a Hugging Face directory that may not hold weights yet.

    Raises:
        InvalidRequestError: see `open_checkpoint`.
    """
    return read_config(path) if (path / "config.json").is_file() else open_checkpoint(path).config
