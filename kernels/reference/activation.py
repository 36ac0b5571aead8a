"""SiTU, K3's only activation (spec k3-model §3)."""

from torch import Tensor


def situ_mul(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((beta * (gate / beta).tanh() * gate.sigmoid()) * (linear_beta * (up / linear_beta).tanh())).to(gate_up.dtype)
