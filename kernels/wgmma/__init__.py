"""Routed MXFP4 experts on Hopper: the platform's own kernels, in CUDA C++."""

import torch

from kernels import nvrtc
from kernels.needs import lacks_gpu
from kernels.ops import OpGeometry


def supports(device: torch.device, geometry: OpGeometry) -> str | None:
    if (reason := lacks_gpu(device, (9, 0), exactly=True)) is not None:
        return reason
    if geometry.dtype != torch.bfloat16:
        return f"takes bfloat16 rows, not {geometry.dtype}"
    if geometry.moe_latent % 256 or geometry.moe_inner % 128:
        return f"latent and inner width must be multiples of 256 and 128, not {geometry.moe_latent} and {geometry.moe_inner}"
    if geometry.top_k > 32:
        return f"takes at most 32 routes a row, not {geometry.top_k}"
    return nvrtc.missing()
