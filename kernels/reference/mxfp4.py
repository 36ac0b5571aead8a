"""MXFP4 weights (spec k3-model §10)."""

import torch
from torch import Tensor

GROUP = 32  # input columns that share one scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., in / 2] uint8, low nibble the even column; scale [..., in / 32] uint8, E8M0 -> [..., in] in `dtype`.

    Every MXFP4 value is exact in bfloat16, save with scales at the edge of its exponents."""
    codes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=packed.device)
    values = codes[torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()]
    factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    return (values.unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2).to(dtype)
