"""The parts of K3 that training needs, differentiable, on whole sequences [B, T, …] and, with `Memory`, token by token.

Parameter names are those of the release (spec k3-model §10), so that export is a copy; only the routed experts are stacked.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.contracts.model import ModelConfig
from training.device import compiled
from training.kda import kda_scan
from training.mxfp4 import fake_quantize


@dataclass
class Memory:
    """What a batch of sequences of equal length remembers between tokens, by layer."""

    capacity: int
    length: int = 0
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def parameter(*shape: int, std: float = 0.0, mean: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std + mean)


class Linear(nn.Module):
    """`weight` alone, [out, in]; `gain` scales the initial output."""

    def __init__(self, inner: int, outer: int, gain: float = 1.0):
        super().__init__()
        self.weight = parameter(outer, inner, std=gain * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Table(nn.Module):
    """`weight` [rows, width], looked up by row."""

    def __init__(self, rows: int, width: int, std: float):
        super().__init__()
        self.weight = parameter(rows, width, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Norm(nn.Module):
    """RMSNorm in float32; the result has the input's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = parameter(width, mean=1.0), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


@compiled
def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@compiled
def mix(candidates: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """Attention over depth: candidates [..., h] -> [..., h] (spec k3-model §2)."""
    scores = [(c.float() * (norm * query[0])).sum(-1) * torch.rsqrt(c.float().square().mean(-1) + eps) for c in candidates]
    shares = torch.stack(scores).softmax(0)
    return torch.stack([s.unsqueeze(-1) * c for s, c in zip(shares, candidates, strict=True)]).sum(0)


@compiled
def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = gate.float(), up.float()
    return ((beta * (g / beta).tanh() * g.sigmoid()) * (linear_beta * (u / linear_beta).tanh())).to(gate.dtype)


class Mixer(nn.Module):
    """The norm and the constant query of one mix."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.proj = Norm(width, 1e-5), Linear(width, 1, gain=0.0)

    def forward(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        return mix([*blocks, prefix], self.norm.weight, self.proj.weight, self.norm.eps)


class Mlp(nn.Module):
    """Gated MLP with SiTU."""

    def __init__(self, c: ModelConfig, inner: int):
        super().__init__()
        self.c = c
        self.gate_proj, self.up_proj = Linear(c.hidden_size, inner), Linear(c.hidden_size, inner)
        self.down_proj = Linear(inner, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.c.situ_beta, self.c.situ_linear_beta))


class Gate(nn.Module):
    """Router weights, and the bias that balances the experts without a loss."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.weight = parameter(c.num_experts, c.hidden_size, std=c.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_experts))
        self.register_buffer("load", torch.zeros(c.num_experts), persistent=False)
        self.e_score_correction_bias: Tensor
        self.load: Tensor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Favour experts that were chosen less than the mean since the last call."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class LatentMoe(nn.Module):
    """Routed experts in MXFP4, all of them computed for every token: at this size that is the fastest way on a GPU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        latent, inner = c.routed_expert_hidden_size, c.moe_intermediate_size
        self.gate = Gate(c)
        self.routed_expert_down_proj = Linear(c.hidden_size, latent)
        self.routed_expert_norm = Norm(latent, c.rms_norm_eps)
        self.routed_expert_up_proj = Linear(latent, c.hidden_size)
        self.w1, self.w3 = (parameter(c.num_experts, inner, latent, std=latent**-0.5) for _ in range(2))
        self.w2 = parameter(c.num_experts, latent, inner, std=inner**-0.5)
        self.shared_experts = Mlp(c, c.shared_intermediate_size)
        self.packed = False  # the experts are MXFP4 values already and stay so

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight).sigmoid()
            ids = (scores + self.gate.e_score_correction_bias).topk(c.num_experts_per_token, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
            weights = scores * chosen
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        if self.training:
            with torch.no_grad():
                self.gate.load += chosen.flatten(0, -2).sum(0)
        z = self.routed_expert_down_proj(x)
        w1, w3, w2 = (w if self.packed else fake_quantize(w) for w in (self.w1, self.w3, self.w2))
        gate, up = F.linear(z, w1.flatten(0, 1)), F.linear(z, w3.flatten(0, 1))
        inner = weighted(gate, up, weights, c.situ_beta, c.situ_linear_beta)
        routed = F.linear(inner, w2.transpose(0, 1).flatten(1))
        return self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(x)


@compiled
def weighted(gate: Tensor, up: Tensor, weights: Tensor, beta: float, linear_beta: float) -> Tensor:
    """All experts' inner rows [..., E * inner], each times its weight [..., E]: w2 is linear, so this is the weighted sum."""
    g, u = gate.float().unflatten(-1, (weights.shape[-1], -1)), up.float().unflatten(-1, (weights.shape[-1], -1))
    inner = (beta * (g / beta).tanh() * g.sigmoid()) * (linear_beta * (u / linear_beta).tanh())
    return (inner * weights.unsqueeze(-1)).flatten(-2).to(gate.dtype)


class Mla(nn.Module):
    """Gated NoPE latent attention in its expanded form."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        heads, h = c.num_attention_heads, c.hidden_size
        self.q_a_proj, self.q_a_layernorm = Linear(h, c.q_lora_rank), Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Linear(c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(h, c.mla_row)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.g_proj = Linear(h, heads * c.v_head_dim)
        self.o_proj = Linear(heads * c.v_head_dim, h)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, h] -> q, k [B, H, T, dk], v [B, H, T, dv]."""
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.num_attention_heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k = torch.cat([k_nope, shared.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)], -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, H, T, dv] -> [B, T, h]."""
        return self.o_proj(o.transpose(1, 2).flatten(-2) * self.g_proj(x).sigmoid())

    def forward(self, x: Tensor, memory: Memory | None, layer: int) -> Tensor:
        q, k, v = self.heads(x)
        if memory is None:
            padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # one width for all three: the fused kernels ask for it
            return self.output(F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : v.shape[-1]], x)
        at = memory.length
        cache = memory.tensors.setdefault(layer, {})
        for name, row in (("k", k), ("v", v)):
            if name not in cache:
                cache[name] = row.new_zeros(*row.shape[:2], memory.capacity, row.shape[-1])
            cache[name][:, :, at : at + 1] = row
        scores = (q @ cache["k"][:, :, : at + 1].mT).float() * self.c.qk_head_dim**-0.5
        return self.output(scores.softmax(-1).to(v.dtype) @ cache["v"][:, :, : at + 1], x)


class Conv(nn.Module):
    """Causal depthwise convolution and SiLU."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = parameter(channels, 1, width, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C], or with its history [B, width - 1 + T, C] -> rows that have a full history."""
        return short_conv(x, self.weight)


@compiled
def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[-1]
    rows = x.shape[1] - width + 1
    return F.silu(sum((weight[:, 0, j] * x[:, j : j + rows] for j in range(1, width)), weight[:, 0, 0] * x[:, :rows])).to(
        x.dtype
    )


class Kda(nn.Module):
    """Kimi delta attention (spec k3-model §5, §6)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        h, heads, dim = c.hidden_size, c.kda_num_heads, c.kda_head_dim
        channels = heads * dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (Linear(h, channels) for _ in range(4))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Conv(channels, c.conv_kernel_size) for _ in range(3))
        self.f_a_proj, self.f_b_proj, self.b_proj = Linear(h, dim), Linear(dim, channels), Linear(h, heads)
        self.A_log = parameter(heads)
        self.dt_bias = nn.Parameter(torch.empty(channels).uniform_(-6.0, -1.0))  # memories from a token to a few hundred
        self.o_norm = Norm(dim, c.rms_norm_eps)
        self.o_proj = Linear(channels, h)

    def forward(self, x: Tensor, memory: Memory | None, layer: int) -> Tensor:
        per_head = (self.c.kda_num_heads, self.c.kda_head_dim)
        raw = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        history = self.c.conv_kernel_size - 1
        if memory is None:
            raw = [F.pad(u, (0, 0, history, 0)) for u in raw]
        else:
            cache = memory.tensors.setdefault(layer, {})
            old = cache.get("conv", x.new_zeros(x.shape[0], history, 3 * raw[0].shape[-1]).to(raw[0].dtype))
            wide = torch.cat([old, torch.cat(raw, -1)], 1)
            cache["conv"] = wide[:, -history:]
            raw = list(wide.chunk(3, -1))
        q, k, v = (
            conv(u).unflatten(-1, per_head) for conv, u in zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), raw, strict=True)
        )
        f = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, per_head)
        q, k, log_decay = _gates(q, k, f, self.A_log, self.dt_bias.view(per_head), self.c.gate_lower_bound)
        beta = self.b_proj(x).float().sigmoid()
        o = kda_scan(q, k, v, log_decay, beta) if memory is None else self._step(q, k, v, log_decay, beta, memory, layer)
        return self.o_proj(gated(o, self.o_norm.weight, self.g_proj(x), self.o_norm.eps))

    @staticmethod
    def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Memory, layer: int) -> Tensor:
        """One token: [B, 1, H, D] -> the same shape."""
        cache = memory.tensors[layer]
        q, k, v, decay, rate = (u[:, 0].float() for u in (q, k, v, log_decay, beta))
        state = cache.get("state")
        if state is None:
            state = k.new_zeros(*k.shape, v.shape[-1])
        state = state * decay.exp().unsqueeze(-1)
        error = rate.unsqueeze(-1) * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        cache["state"] = state = state + k.unsqueeze(-1) * error.unsqueeze(-2)
        return torch.einsum("bhk,bhkv->bhv", q, state).unsqueeze(1)


@compiled
def gated(o: Tensor, norm: Tensor, gate: Tensor, eps: float) -> Tensor:
    """o [B, T, H, D] float32, gate [B, T, H * D] -> [B, T, H * D] in the gate's dtype."""
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * norm
    return (o.flatten(-2) * gate.float().sigmoid()).to(gate.dtype)


@compiled
def _gates(
    q: Tensor, k: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised q and k, and the log decay."""
    q, k, f = q.float(), k.float(), f.float()
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return q, k, lower_bound * torch.sigmoid(a_log.exp()[:, None] * (f + dt_bias))
