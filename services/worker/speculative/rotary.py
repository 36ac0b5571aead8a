"""Rotary embedding of a DSpark drafter: interleaved pairs (2i, 2i + 1), static YaRN frequencies (spec speculation §3)."""

import math

import torch
from torch import Tensor

from services.contracts.draft import Yarn


def frequencies(rope: Yarn, dim: int) -> Tensor:
    """[dim / 2] float64, radians a position: fast pairs as they are, slow ones divided by the factor, a ramp between them."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    plain = rope.theta ** (-2 * pair / dim)

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), dim - 1)
    slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - slow) + plain / rope.factor * slow


def rotate(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """x [T, ..., dim] at positions [T] -> the same shape and dtype. Angles in float64: a million positions are many turns."""
    angle = positions.double()[:, None] * frequency
    angle = angle.view(len(positions), *[1] * (x.dim() - 2), -1)
    cos, sin = angle.cos().float(), angle.sin().float()
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
