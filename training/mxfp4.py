"""MXFP4 in training: the values that packed weights will have, and their packing (spec k3-model §10)."""

import torch
from torch import Tensor

from training.device import compiled

GROUP = 32
LARGEST = 6.0


def fake_quantize(weight: Tensor) -> Tensor:
    """The nearest MXFP4 values of [..., in]; the gradient passes as if nothing had happened."""
    return weight + _error(weight.detach())


@compiled
def _error(weight: Tensor) -> Tensor:
    values, scale = _split(weight)
    return (_round(values) * scale).flatten(-2) - weight


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., in] float32 -> packed [..., in / 2] uint8 with the low nibble first, E8M0 scales [..., in / 32] uint8."""
    values, scale = _split(weight.float())
    rounded = _round(values).flatten(-2)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=weight.device)
    codes = torch.searchsorted(magnitudes, rounded.abs()).to(torch.uint8) | (rounded < 0).to(torch.uint8) << 3
    exponents = (scale.squeeze(-1).log2().round() + 127).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponents


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Groups over their scale [..., in / 32, 32], and the scales [..., in / 32, 1]: powers of two, so that the largest
    magnitude of a group falls into 4 … 8."""
    groups = weight.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(largest.log2().floor() - 2)
    return groups / scale, scale


def _round(x: Tensor) -> Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with their sign."""
    size = x.abs()
    size = torch.where(size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2))
    return size.clamp_max(LARGEST).copysign(x)
