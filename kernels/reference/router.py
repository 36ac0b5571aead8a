"""Expert selection (spec k3-model §8)."""

import torch
from torch import Tensor


def router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
    scores = (x.float() @ weight.float().T).sigmoid()
    # A stable sort keeps the smallest id first among equals; topk promises no order.
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, ids)  # the bias selects only
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling
