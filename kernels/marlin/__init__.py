"""Routed MXFP4 experts by Marlin's W4A16 product, from the wheel tokenspeed-kernel."""

import torch

from kernels.marlin import library
from kernels.needs import lacks_gpu, lacks_package
from kernels.ops import OpGeometry


def supports(device: torch.device, geometry: OpGeometry) -> str | None:
    if (reason := lacks_gpu(device, (9, 0))) is not None:
        return reason
    if geometry.dtype != torch.bfloat16:
        return f"takes bfloat16 rows, not {geometry.dtype}"
    if geometry.moe_latent % 256 or geometry.moe_inner % 128:
        return f"latent and inner width must be multiples of 256 and 128, not {geometry.moe_latent} and {geometry.moe_inner}"
    return lacks_package("triton") or library.missing()
