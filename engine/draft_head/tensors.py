"""A head's tensors as they lie in its file."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from graftline.engine.draft_head.config import WEIGHTS_FILE
from graftline.errors import InvalidRequestError


def read_tensors(folder: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of the head in a folder, as stored.

    Raises:
        InvalidRequestError: the file is missing or broken.
    """
    file = folder / WEIGHTS_FILE
    try:
        return load_file(file, device=str(device))
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError("draft_head", f"{file} cannot be read: {error}") from error
