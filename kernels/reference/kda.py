"""Kimi delta attention: short convolution, gated delta-rule recurrence, gated output norm (spec k3-model §5, §6)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, fresh: Tensor, cu_seqlens: Tensor) -> Tensor:
    out, state[slots] = _convolve(x, weight, state[slots], fresh | (slots == 0), cu_seqlens)
    return out


def short_conv_verify(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _convolve(x, weight, state[slots], slots == 0, cu_seqlens)[0]


def _convolve(x: Tensor, weight: Tensor, before: Tensor, zero: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """before [B, C, W-1] histories, taken as zero at zero [B] bool -> rows [T, C] and the new histories."""
    history = weight.shape[1] - 1
    bounds = cu_seqlens.long()
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    # Each sequence's history goes before its rows, so that every row finds its predecessors right above it.
    place = rows + (sequence + 1) * history
    steps = torch.arange(history, device=x.device)
    heads = bounds[:-1, None] + torch.arange(len(before), device=x.device)[:, None] * history + steps  # [B, W-1]
    tails = heads + bounds.diff()[:, None]

    padded = x.new_empty(x.shape[0] + len(before) * history, x.shape[1], dtype=torch.float32)
    padded[place] = x.float()
    padded[heads] = torch.where(zero[:, None, None], 0.0, before.float()).transpose(1, 2)
    out = sum((weight[:, tap] * padded[place - history + tap] for tap in range(history)), weight[:, history] * padded[place])
    return F.silu(out).to(x.dtype), padded[tails].transpose(1, 2).to(before.dtype)


def kda_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    fresh: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    zero = fresh | (slots == 0)
    out, state[slots] = _recur(q, k, v, decay, beta, a_log, dt_bias, lower_bound, state[slots], zero, cu_seqlens)
    return out


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    return _recur(q, k, v, decay, beta, a_log, dt_bias, lower_bound, state[slots], slots == 0, cu_seqlens)[0]


def kda_commit(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
) -> None:
    lengths = torch.where(slots == 0, 0, torch.minimum(accepted, cu_seqlens.diff()))
    sequence = torch.repeat_interleave(cu_seqlens.diff())
    kept = torch.arange(len(sequence), device=qkv.device) - cu_seqlens[sequence] < lengths[sequence]
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    never = torch.zeros_like(slots, dtype=torch.bool)
    qkv = short_conv(qkv[kept], conv_weight, conv_state, slots, never, cu_seqlens)
    q, k, v = qkv.unflatten(-1, (3, *decay.shape[1:])).unbind(1)
    kda_scan(q, k, v, decay[kept], beta[kept], a_log, dt_bias, lower_bound, state, slots, never, cu_seqlens)


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    before: Tensor,
    zero: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """before [B, H, key, value] states, taken as zero at zero [B] bool -> o [T, H, D] and the new states."""
    heads, dim = q.shape[1:]
    order, rows, active = _time_major(cu_seqlens)

    def by_time(x: Tensor) -> Tensor:
        """[T, H, ...] -> [T * H, ...] float32, all sequences' first rows before all second rows."""
        return x[rows].float().flatten(0, 1)

    qn, kn, values = by_time(q), by_time(k), by_time(v)
    qn = qn * torch.rsqrt(qn.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5
    kn = kn * torch.rsqrt(kn.square().sum(-1, keepdim=True) + 1e-6)
    keep = by_time(torch.exp(lower_bound * torch.sigmoid(a_log.exp()[:, None] * (decay.float() + dt_bias)))).unsqueeze(-1)
    rate = by_time(beta).sigmoid()[:, None, None]
    qn, keys, kn, values = qn.unsqueeze(1), kn.unsqueeze(-1), kn.unsqueeze(1), values.unsqueeze(1)

    s = torch.where(zero[order, None, None, None], 0.0, before[order]).flatten(0, 1)  # [B * H, key, value]
    out = q.new_empty(q.shape[0] * heads, v.shape[-1], dtype=torch.float32)
    start = 0
    for count in active:  # sequences that have a row at this time
        stop = start + count * heads
        now = s[: count * heads]
        now.mul_(keep[start:stop])
        error = rate[start:stop] * (values[start:stop] - torch.bmm(kn[start:stop], now))
        now.baddbmm_(keys[start:stop], error)
        out[start:stop] = torch.bmm(qn[start:stop], now).squeeze(1)
        start = stop
    after = torch.empty_like(before)
    after[order] = s.unflatten(0, (-1, heads))
    result = torch.empty_like(v)
    result[rows] = out.unflatten(0, (-1, heads)).to(result.dtype)
    return result, after


def kda_output(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = o.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight * gate.float().sigmoid()
    return wide.flatten(1).to(o.dtype)


def _time_major(cu_seqlens: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Sequences by falling length, their rows time after time, and how many sequences have a row at each time."""
    bounds = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(bounds)]
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    active = [sum(length > t for length in lengths) for t in range(max(lengths, default=0))]
    rows = [bounds[b] + t for t, count in enumerate(active) for b in order[:count]]
    device = cu_seqlens.device
    return torch.tensor(order, device=device, dtype=torch.long), torch.tensor(rows, device=device, dtype=torch.long), active
