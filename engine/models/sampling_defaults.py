"""How a model's makers would have its tokens drawn where a request does not say: part of `generation_config.json`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftline.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_RANGES = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
_PENALTY = "repetition_penalty"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """None: the makers do not say.

    Attributes:
        top_k: 0 is no limit.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """What a parsed `generation_config.json` says. `do_sample`, which other servers do not look at either, is ignored.

    Raises:
        InvalidRequestError: a value that no request could have.
    """
    numbers = {name: _number(generation, name) for name in _RANGES}
    penalty = generation.get(_PENALTY)
    if penalty not in (None, 1, 1.0):
        logger.warning("generation_config.json: %s %r is not supported and not applied", _PENALTY, penalty)
    return SamplingDefaults(top_k=_top_k(generation), **numbers)


def _number(generation: Mapping[str, Any], name: str) -> float | None:
    value = generation.get(name)
    if value is None:
        return None
    low, high = _RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
        raise InvalidRequestError(f"generation_config.json: {name}", f"{value!r} is not in [{low:g}, {high:g}]")
    return float(value)


def _top_k(generation: Mapping[str, Any]) -> int | None:
    value = generation.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
        raise InvalidRequestError("generation_config.json: top_k", f"{value!r} is not a number of tokens")
    return max(value, 0)
