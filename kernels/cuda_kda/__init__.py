"""KDA over the window of a verify round, in CUDA C++: there registers have to be laid out by hand."""

import torch

from kernels.needs import lacks_gpu
from kernels.nvrtc import missing
from kernels.ops import OpGeometry


def supports(device: torch.device, geometry: OpGeometry) -> str | None:
    if (reason := lacks_gpu(device, (9, 0))) is not None:
        return reason
    if geometry.dtype != torch.bfloat16 or geometry.cache_dtype != torch.bfloat16:
        return f"bfloat16 only, this is {geometry.dtype} with histories of {geometry.cache_dtype}"
    if (geometry.kda_head_dim, geometry.conv_width) != (128, 4):
        return f"head_dim 128 and 4 taps only, this model has {geometry.kda_head_dim} and {geometry.conv_width}"
    return missing()
