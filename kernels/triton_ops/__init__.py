"""The platform's own kernels, in Triton: everything that no vendor's library offers, and attention where its library is not
installed. Nothing here imports triton before `supports_…` was asked."""

import torch

from kernels.needs import lacks_gpu, lacks_package
from kernels.ops import OpGeometry


def supports_rows(device: torch.device, geometry: OpGeometry) -> str | None:
    """Ops that work row by row, of any width."""
    return lacks_gpu(device) or lacks_package("triton")


def supports_kda(device: torch.device, geometry: OpGeometry) -> str | None:
    dim, width = geometry.kda_head_dim, geometry.conv_width
    if not _power(dim, 16, 128):
        return f"head_dim 16, 32, 64 or 128 only, this model has {dim}"
    if width != 4:
        return f"convolutions of 4 taps only, this model has {width}"
    return supports_rows(device, geometry)


def supports_mla(device: torch.device, geometry: OpGeometry) -> str | None:
    if {geometry.dtype, geometry.cache_dtype} != {torch.bfloat16}:
        return f"bfloat16 only, this is {geometry.dtype} over a cache of {geometry.cache_dtype}"
    for name, width, most in (("kv_lora_rank", geometry.mla_latent, 512), ("qk_rope_head_dim", geometry.mla_shared, 128)):
        if not _power(width, 16, most):
            return f"{name} must be a power of two from 16 to {most}, this model has {width}"
    return supports_rows(device, geometry)


def _power(value: int, least: int, most: int) -> bool:
    return value.bit_count() == 1 and least <= value <= most
