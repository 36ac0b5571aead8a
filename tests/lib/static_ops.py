"""Ops of decode rounds whose host code sees shapes alone, so that a round of any small geometry can be captured: every sequence
has the same number of rows. Slow and plain; kernels for GPUs have tests of their own."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops import BLOCK_ROWS, Ops, Plans
from kernels.reference.activation import situ_mul
from kernels.reference.kda import short_conv
from kernels.reference.mxfp4 import dequantize


def static(ops: Ops) -> Ops:
    return replace(
        ops, mla_decode=mla_decode, mla_block=mla_block, kda_decode=kda_decode, kda_verify=kda_verify, kda_commit=kda_commit,
        prepare_experts=StaticExperts,
    )  # fmt: skip


def mla_decode(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, scale: float, latent: int,
    plans: Plans | None = None,
) -> Tensor:  # fmt: skip
    return _attend(q, cache, block_tables, context_lens, scale, latent, causal=True)


def mla_block(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, scale: float, latent: int,
    plans: Plans | None = None,
) -> Tensor:  # fmt: skip
    return _attend(q, cache, block_tables, context_lens, scale, latent, causal=False)


def _attend(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float, latent: int, causal: bool
) -> Tensor:
    count, columns = block_tables.shape
    rows = q.unflatten(0, (count, -1)).float()  # [B, w, H, row]
    keys = cache[block_tables.long(), :, 0].flatten(1, 2).float()  # [B, M * 128, row]
    width = rows.shape[1]
    seen = context_lens.unsqueeze(1) - (torch.arange(width - 1, -1, -1, device=q.device) if causal else 0)
    at = torch.arange(columns * BLOCK_ROWS, device=q.device)
    scores = torch.einsum("bwhr,bkr->bwhk", rows, keys) * scale
    scores = scores.masked_fill((at >= seen.unsqueeze(-1)).unsqueeze(2), float("-inf"))
    return torch.einsum("bwhk,bkl->bwhl", scores.softmax(-1), keys[..., :latent]).flatten(0, 1).to(q.dtype)


def _steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float,
    state: Tensor, accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows [T, H, D] of sequences with states [B, H, K, V] -> outputs, and the states after the accepted rows of each."""
    count = state.shape[0]

    def by_time(x: Tensor) -> Tensor:
        return x.float().unflatten(0, (count, -1)).transpose(0, 1)

    qs, ks, vs = by_time(q), by_time(k), by_time(v)
    qs = qs * torch.rsqrt(qs.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    ks = ks * torch.rsqrt(ks.square().sum(-1, keepdim=True) + 1e-6)
    keep = by_time(torch.exp(lower_bound * torch.sigmoid(a_log.exp()[:, None] * (decay.float() + dt_bias))))
    rate = by_time(beta.float().sigmoid()).unsqueeze(-1)
    outs: list[Tensor] = []
    for time, (qt, kt, vt, decays, rates) in enumerate(zip(qs, ks, vs, keep, rate, strict=True)):
        moved = state * decays.unsqueeze(-1)
        error = rates * (vt - torch.einsum("bhkv,bhk->bhv", moved, kt))
        moved = moved + kt.unsqueeze(-1) * error.unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", moved, qt))
        state = moved if accepted is None else torch.where((accepted > time)[:, None, None, None], moved, state)
    return torch.stack(outs, 1).flatten(0, 1).to(q.dtype), state


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float,
    state: Tensor, slots: Tensor, fresh: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    live = (~fresh & (slots > 0))[:, None, None, None]
    out, state[slots] = _steps(q, k, v, decay, beta, a_log, dt_bias, lower_bound, torch.where(live, state[slots], 0.0))
    return out


def kda_verify(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float,
    state: Tensor, slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    before = torch.where((slots > 0)[:, None, None, None], state[slots], 0.0)
    return _steps(q, k, v, decay, beta, a_log, dt_bias, lower_bound, before)[0]


def kda_commit(
    qkv: Tensor, conv_weight: Tensor, conv_state: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float, state: Tensor, slots: Tensor, cu_seqlens: Tensor, accepted: Tensor,
) -> None:  # fmt: skip
    live = slots > 0
    history = conv_state[slots]
    scratch = torch.cat([torch.zeros_like(history[:1]), history])  # moved on by all rows, and not used
    places = torch.arange(1, len(scratch), device=slots.device)
    convolved = short_conv(qkv, conv_weight, scratch, torch.where(live, places, 0), torch.zeros_like(live), cu_seqlens)
    q, k, v = convolved.unflatten(-1, (3, *decay.shape[1:])).unbind(1)
    taken = torch.where(live, accepted, 0)
    _, state[slots] = _steps(q, k, v, decay, beta, a_log, dt_bias, lower_bound, state[slots], taken)
    rows = torch.cat([history.float(), qkv.float().unflatten(0, (len(slots), -1)).transpose(1, 2)], -1)  # [B, C, W - 1 + w]
    window = taken.unsqueeze(1) + torch.arange(history.shape[-1], device=slots.device)
    conv_state[slots] = rows.gather(2, window.unsqueeze(1).expand(-1, rows.shape[1], -1)).to(history.dtype)


class StaticExperts:
    """All experts for all rows, and most of it thrown away."""

    def __init__(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, beta: float, linear_beta: float, dtype: torch.dtype
    ):
        self.num_local = w13.shape[0]
        self._w13, self._w2 = dequantize(w13, w13_scale, torch.float32), dequantize(w2, w2_scale, torch.float32)
        self._beta, self._linear_beta = beta, linear_beta

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        inner = situ_mul(torch.einsum("ml,eil->mei", x.float(), self._w13), self._beta, self._linear_beta)
        every = torch.einsum("mei,eli->mel", inner, self._w2)
        share = torch.zeros(len(x), self.num_local + 1, device=x.device).scatter_add_(1, ids + 1, weights)[:, 1:]
        return torch.einsum("mel,me->ml", every, share).to(x.dtype)

    def grouped(self, x: Tensor, counts: Tensor, most: int | None = None) -> Tensor:
        raise AssertionError("one rank routes")
