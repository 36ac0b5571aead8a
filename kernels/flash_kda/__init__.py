"""FlashKDA's scan of prompts for Hopper and later."""

import torch

from kernels.needs import lacks_gpu, lacks_package
from kernels.ops import OpGeometry


def supports(device: torch.device, geometry: OpGeometry) -> str | None:
    if (reason := lacks_gpu(device, (9, 0))) is not None:
        return reason
    if geometry.dtype != torch.bfloat16:
        return f"bfloat16 only, this is {geometry.dtype}"
    if geometry.kda_head_dim != 128:
        return f"head_dim 128 only, this model has {geometry.kda_head_dim}"
    return lacks_package("flash_kda") or lacks_package("triton")
