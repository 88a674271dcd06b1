"""Rotary table: the cosines and sines of every position, and the factors of queries, from a model's configuration.

Owns the frequencies of each kind of rope scaling, computed in fp32 as transformers computes them. Does not own the
kinds (rope.py) or the rotation of heads (the kernels).

Shapes: D head size, F frequencies, half as many as rotated dimensions, M positions.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from blockyard.worker.model.traits.family import QueryScaling


def rotated_order(config: ModelConfig) -> list[int]:
    """Return the order in which a head's dimensions are kept, so that its halves hold the pairs that turn together.

    Queries and keys are both in this order, so their products stay. The pairs that do not turn come last in a half.
    """
    head_dim, rotary_dim = config.head_dim, config.rotary_dim
    if config.rotates_adjacent:
        return [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    turning, staying = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    first, second = (
        turning[: rotary_dim // 2] + staying[: len(staying) // 2],
        turning[rotary_dim // 2 :] + staying[len(staying) // 2 :],
    )
    return first + second


def rotary_table(config: ModelConfig, theta: float | None = None, *, rotates: bool = True) -> torch.Tensor:
    """Return [M, D] in fp32: cosines of position * frequency in the first half of the columns, then sines.

    The frequencies are theta^(-2 i / D), scaled as the model says. With `theta` they have this base, unscaled. Where
    less than a head is rotated, D is the rotated part there, and the last pairs of the table do not turn. Without
    `rotates` no pair does.
    """
    if theta is not None:
        config = replace(config, rope_theta=theta, rope_scaling=None)
    angle_MF = torch.arange(config.max_position_embeddings).float()[:, None] * _frequencies(config)
    if not rotates:
        return torch.cat((torch.ones_like(angle_MF), torch.zeros_like(angle_MF)), dim=1)
    scaling = config.rope_scaling
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0
    staying = (0, (config.head_dim - config.rotary_dim) // 2)
    cos_MF, sin_MF = (
        F.pad(angle_MF.cos() * factor, staying, value=1.0),
        F.pad(angle_MF.sin() * factor, staying),
    )
    return torch.cat((cos_MF, sin_MF), dim=1)


def query_scales(scaling: QueryScaling, num_positions: int) -> torch.Tensor:
    """Return the factor of a query at each position [M], in fp32."""
    steps_M = ((torch.arange(num_positions) + scaling.offset) // scaling.every).float()
    return 1.0 + scaling.beta * steps_M.log1p()


def _frequencies(config: ModelConfig) -> torch.Tensor:
    exponent_F = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequency_F = 1.0 / config.rope_theta**exponent_F
    match config.rope_scaling:
        case None:
            return frequency_F
        case LinearScaling(factor=factor):
            return frequency_F / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequency_F, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequency_F, scaling, config.rope_theta)
        case LongRopeScaling(short_factors=factors):
            # In transformers' order of operations.
            return 1.0 / (torch.tensor(factors) * config.rope_theta**exponent_F)


def _llama3(frequency_F: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    original = scaling.original_max_position_embeddings
    wavelength_F = 2 * math.pi / frequency_F
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = (original / wavelength_F - low) / (high - low)
    blended_F = (1 - kept_F) * frequency_F / scaling.factor + kept_F * frequency_F
    scaled_F = torch.where(wavelength_F < original / high, frequency_F, blended_F)
    return torch.where(wavelength_F > original / low, frequency_F / scaling.factor, scaled_F)


def _yarn(frequency_F: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    head_dim = 2 * len(frequency_F)

    def dimension_of(turns: float) -> float:
        """Return the dimension with a wave that turns this often within the original context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    slowed_F = ((torch.arange(len(frequency_F)).float() - low) / width).clamp(0, 1)
    return frequency_F / scaling.factor * slowed_F + frequency_F * (1 - slowed_F)
