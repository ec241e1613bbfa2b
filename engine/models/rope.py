"""Rotary position embedding: its parameters, and the frequencies they give.

Sources: RoFormer (Su et al., 2021); position interpolation (Chen et al., 2023); YaRN (Peng et al., 2023,
section 3); the frequency-dependent scaling published with Llama 3.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Draft nodes may stand past the context's end before they are cut; their rotations must exist.
POSITIONS_PAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves divided by `factor`, short ones kept, a ramp between; lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: interpolated below `beta_slow` turns in the original context, kept above `beta_fast`.

    Attributes:
        attention_factor: multiplies cos and sin.
        truncate: round the ends of the ramp to whole dimensions.
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency divided by a number of its own: how GGUF files carry Llama 3's scaling."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Base of the frequencies and what stretches them."""

    theta: float
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin; 1 for all but YaRN."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's default temperature of the attention, as a factor of cos and sin."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position for each pair of dimensions.

    Returns:
        float32 [head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DivisorScaling(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope.theta, head_dim, scaling)


def rope_tables(rope: Rope, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for `graftline.kernels.rope`, the attention factor included.

    Returns:
        Two of float32 [num_positions, head_dim / 2].
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    waves_in_context = scaling.original_context * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((waves_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    def dimension_of(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        wave = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
