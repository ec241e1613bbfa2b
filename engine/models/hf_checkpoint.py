"""Hugging Face directories: config.json and safetensors, in one file or in shards."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftline.engine.models.card import ModelCardData, read_card
from graftline.engine.models.config import ModelConfig, read_config, read_json
from graftline.engine.models.content_hash import content_hash
from graftline.errors import InvalidRequestError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfCheckpoint:
    """See `checkpoint.Checkpoint`.

    Raises:
        InvalidRequestError: a config that is not supported, or no safetensors files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: ModelConfig = read_config(path)
        self._handles: dict[Path, Any] = {}
        self._file_of = self._find_tensors()

    @cached_property
    def model_hash(self) -> str:
        """Hash of the config and of the weights."""
        return content_hash(sorted(set(self._file_of.values())), repr(self.config).encode())

    @cached_property
    def card(self) -> ModelCardData:
        """Tokenizer, template and ids."""
        return read_card(self.path, self.config)

    def has_tensor(self, name: str) -> bool:
        """Whether a file holds the parameter of that name."""
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """The parameter of that name; float16 comes as float32."""
        if name not in self._file_of:
            raise InvalidRequestError("model", f"{self.path} has no tensor {name}")
        file = self._file_of[name]
        try:
            value: Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:  # an index may name what its file does not hold
            raise InvalidRequestError("model", f"cannot read tensor {name} of {file}: {error}") from error
        if value.dtype == torch.float16:
            return value.float()
        if value.dtype not in (torch.float32, torch.bfloat16):
            raise InvalidRequestError("model", f"tensor {name} of {self.path} is stored as {value.dtype}")
        return value

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidRequestError("model", f"cannot read {path}: {error}") from error
        return self._handles[path]

    def _find_tensors(self) -> Mapping[str, Path]:
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.exists():
            return dict.fromkeys(self._handle(single).keys(), single)
        if not index.exists():
            raise InvalidRequestError("model", f"{self.path} holds neither {_SINGLE} nor {_INDEX}")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidRequestError("model", f"{index} has no weight_map")
        found = {name: self.path / file for name, file in weight_map.items()}
        if missing := sorted({path.name for path in found.values() if not path.exists()}):
            raise InvalidRequestError("model", f"{self.path} lacks {', '.join(missing)}")
        return found
