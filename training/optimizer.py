"""Muon for matrices, Adam for the rest, with one learning rate schedule."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ADAM_NAMES = (
    "embed_tokens",
    "lm_head",
    "gate.weight",
    "b_proj",
    "conv1d",
    "norm",
    "_res.",
    "A_log",
    "dt_bias",
    "markov",
    "confidence",
)


class Optimizer:
    """Muon steps are orthogonalised momentum (Newton-Schulz, five iterations), all matrices of one shape at once."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], matrix_rate: float, vector_rate: float, decay: float):
        self.matrix_rate, self.decay = matrix_rate, decay
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for name, weight in named:
            if weight.ndim < 2 or any(part in name for part in ADAM_NAMES):
                others.append(weight)
            else:
                shapes[tuple(weight.shape)].append(weight)
        self.groups = list(shapes.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.adam = torch.optim.AdamW(others, lr=vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
        self.vector_rate = vector_rate
        self.weights = [*others, *(weight for group in self.groups for weight in group)]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the rates; gradients are cleared."""
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.vector_rate * factor
        self.adam.step()
        rate = self.matrix_rate * factor
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp(momentum, 0.95))
            rows, columns = update.shape[-2:]
            scale = rate * math.sqrt(max(1.0, rows / columns))
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - rate * self.decay).add_(change, alpha=-scale)
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momenta = state["momenta"]


def orthogonalised(gradient: Tensor) -> Tensor:
    """[..., m, n] -> the nearest semi-orthogonal matrices, roughly."""
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


def schedule(progress: float) -> float:
    """Factor of the rate at `progress` in [0, 1]: warm-up, plateau, linear decay from 40 % on."""
    if progress < 0.01:
        return progress / 0.01
    return min(1.0, (1.0 - progress) / 0.6 + 0.02)
