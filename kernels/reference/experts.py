"""Routed experts of one layer in both layouts (spec moe-ep §3, §4). They are dequantised once, to float32: eight times the
packed bytes, for small models and for comparisons."""

import torch
from torch import Tensor

from kernels.reference.activation import situ_mul
from kernels.reference.mxfp4 import dequantize


def prepare_experts(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, beta: float, linear_beta: float, dtype: torch.dtype
) -> "ReferenceExperts":
    del dtype  # maths and weights are float32 whatever the rows are
    return ReferenceExperts(
        dequantize(w13, w13_scale, torch.float32), dequantize(w2, w2_scale, torch.float32), beta, linear_beta
    )


class ReferenceExperts:
    def __init__(self, w13: Tensor, w2: Tensor, beta: float, linear_beta: float):
        self.num_local = w13.shape[0]
        self.w13 = w13.transpose(1, 2)  # [E, latent, 2 * inner]
        self.w2 = w2.transpose(1, 2)  # [E, inner, latent]
        self.beta = beta
        self.linear_beta = linear_beta

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        by_expert = flat.argsort(stable=True)
        parked, *counts = torch.bincount(flat + 1, minlength=self.num_local + 1).tolist()
        live = by_expert[parked:]  # routes to -1 come first and stay zero
        outputs = x.new_zeros(flat.shape[0], x.shape[1], dtype=torch.float32)
        outputs[live] = self._mlp(x[live // ids.shape[1]].float(), counts)
        return (outputs.unflatten(0, ids.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def grouped(self, x: Tensor, counts: Tensor, most: int | None = None) -> Tensor:
        valid = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        out = torch.full_like(x, float("nan"))  # nobody may read the rest, so reading it must show
        out[valid] = self._mlp(x[valid].float(), counts.tolist()).to(x.dtype)
        return out

    def _mlp(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [n, latent] float32 in expert order, counts[e] of them for expert e -> [n, latent]."""
        inner = situ_mul(self._product(rows, self.w13, counts), self.beta, self.linear_beta)
        return self._product(inner, self.w2, counts)

    @staticmethod
    def _product(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                torch.mm(rows[start : start + count], weight[expert], out=out[start : start + count])
                start += count
        return out
