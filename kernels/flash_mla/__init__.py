"""FlashMLA's dense decode kernel for Hopper, behind decode rounds, prompt chunks and a drafter's blocks."""

import torch

from kernels.needs import lacks_gpu, lacks_package
from kernels.ops import OpGeometry


def supports(device: torch.device, geometry: OpGeometry) -> str | None:
    if (reason := lacks_gpu(device, (9, 0), exactly=True)) is not None:
        return reason
    if {geometry.dtype, geometry.cache_dtype} != {torch.bfloat16}:
        return f"bfloat16 only, this is {geometry.dtype} over a cache of {geometry.cache_dtype}"
    if (geometry.mla_latent, geometry.mla_shared) != (512, 64):
        return f"cache rows of 512 + 64 only, this model has {geometry.mla_latent} + {geometry.mla_shared}"
    return lacks_package("flash_mla") or lacks_package("triton")
