"""A head's weights on disk: reading ours and public ones, and writing what training made."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from graftline.engine.draft_head.config import CONFIG_FILE, WEIGHTS_FILE, DraftHeadConfig, read_draft_head_config
from graftline.engine.draft_head.module import HeadWeights, feature_columns, tensor_sizes
from graftline.engine.draft_head.spread import FeatureSpread
from graftline.engine.draft_head.tensors import read_tensors
from graftline.errors import InvalidRequestError

_OPTIONAL = ("fc.bias", "input_layernorm.weight")


def read_draft_head(folder: Path) -> tuple[DraftHeadConfig, dict[str, Tensor]]:
    """Config and tensors of the head in a folder, as stored.

    Raises:
        InvalidRequestError: a file is missing or broken, or a tensor is missing or of the wrong shape.
    """
    config = read_draft_head_config(folder)
    file = folder / WEIGHTS_FILE
    tensors = read_tensors(folder)
    num_features = tensors["fc.weight"].shape[1] // config.target_hidden_size if "fc.weight" in tensors else 1
    for name, size in tensor_sizes(config, num_features).items():
        if name not in tensors and name.endswith(_OPTIONAL):
            continue
        if name not in tensors or tuple(tensors[name].shape) != size:
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise InvalidRequestError("draft_head", f"{file}: {name} is {found}, not {size}")
    if config.reduced_vocab and "d2t" not in tensors:
        raise InvalidRequestError("draft_head", f"{file} has a reduced vocabulary but no d2t")
    return config, tensors


def kept_ids(config: DraftHeadConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Target ids of the draft vocabulary, [V] int64."""
    draft_ids = torch.arange(config.draft_vocab_size)
    return draft_ids + tensors["d2t"].long() if "d2t" in tensors else draft_ids


def fold_spread(config: DraftHeadConfig, trained: Mapping[str, Tensor], spread: FeatureSpread) -> dict[str, Tensor]:
    """Tensors that read raw features, from tensors trained on standardised ones.

    The bias is made for the matrix as it will be stored, since a few features have means of hundreds and rounding
    would otherwise be multiplied by them.
    """
    tensors = {name: value.detach().float().cpu() for name, value in trained.items()}
    columns = feature_columns(config)
    weight = tensors["fc.weight"].clone()
    weight[:, columns] *= spread.inverse_deviation.float().cpu()
    stored = weight.to(torch.bfloat16)
    shift = stored[:, columns].double() @ spread.mean.double().cpu()
    return {**tensors, "fc.weight": stored, "fc.bias": (tensors["fc.bias"].double() - shift).float()}


def write_draft_head(folder: Path, config: DraftHeadConfig, tensors: Mapping[str, Tensor], kept: Tensor) -> None:
    """Write config.json and model.safetensors: matrices in bfloat16, vectors in float32, d2t as offsets."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: value.to(torch.bfloat16 if value.ndim == 2 else torch.float32).contiguous()
        for name, value in tensors.items()
    }
    if config.reduced_vocab:
        stored["d2t"] = kept.cpu().long() - torch.arange(len(kept))
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt", "kind": json.dumps(config.kind.value)})
    (folder / CONFIG_FILE).write_text(config.to_json())


def head_weights(config: DraftHeadConfig, tensors: Mapping[str, Tensor], like: Tensor) -> HeadWeights:
    """Weights for a forward on the device and in the type of `like`."""
    return HeadWeights.from_tensors(
        config, {name: value.to(like.device) for name, value in tensors.items()}, like.dtype
    )
