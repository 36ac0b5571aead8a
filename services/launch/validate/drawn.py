"""Random routed experts."""

import torch
from torch import Tensor

Packed = tuple[Tensor, Tensor, Tensor, Tensor]  # w13, its scales, w2, its scales: MXFP4 as loaded


def random_experts(experts: int, latent: int, inner: int, device: torch.device) -> Packed:
    """The same at every call."""
    drawn = torch.Generator(device).manual_seed(1)

    def bits(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=drawn, device=device, dtype=torch.uint8)

    return (
        bits(0, 256, experts, 2 * inner, latent // 2),
        bits(119, 121, experts, 2 * inner, latent // 32),
        bits(0, 256, experts, latent, inner // 2),
        bits(119, 121, experts, latent, inner // 32),
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of norms; infinite where something is not finite."""
    if not wanted.numel():
        return 0.0
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-9))
    return error if error == error else float("inf")
