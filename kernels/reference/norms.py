"""RMSNorm, and the mix over depth that takes the place of a residual stream (spec k3-model §2)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def attn_res_mix(blocks: Tensor, prefix: Tensor, weight: Tensor, eps: float) -> Tensor:
    candidates = torch.cat([blocks, prefix.unsqueeze(0)]).float()  # [n + 1, T, h]
    scores = (candidates @ weight) * torch.rsqrt(candidates.square().mean(-1) + eps)
    return (scores.softmax(0).unsqueeze(-1) * candidates).sum(0).to(prefix.dtype)
