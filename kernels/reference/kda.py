"""Kimi delta attention: short convolution, gated delta-rule recurrence, gated output norm (spec k3-model §5, §6)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, fresh: Tensor, cu_seqlens: Tensor) -> Tensor:
    history = weight.shape[1] - 1
    bounds = cu_seqlens.long()
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    # Each sequence's history goes before its rows, so that every row finds its predecessors right above it.
    place = rows + (sequence + 1) * history
    before = torch.arange(history, device=x.device)
    heads = bounds[:-1, None] + torch.arange(len(slots), device=x.device)[:, None] * history + before  # [B, W-1]
    tails = heads + bounds.diff()[:, None]

    padded = x.new_empty(x.shape[0] + len(slots) * history, x.shape[1], dtype=torch.float32)
    padded[place] = x.float()
    padded[heads] = torch.where(_zeroed(slots, fresh, 3), 0.0, state[slots].float()).transpose(1, 2)
    out = sum((weight[:, tap] * padded[place - history + tap] for tap in range(history)), weight[:, history] * padded[place])
    state[slots] = padded[tails].transpose(1, 2).to(state.dtype)
    return F.silu(out).to(x.dtype)


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

    slots, fresh = slots[order], fresh[order]
    s = torch.where(_zeroed(slots, fresh, 4), 0.0, state[slots]).flatten(0, 1)  # [B * H, key, value]
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
    state[slots] = s.unflatten(0, (-1, heads))

    result = torch.empty_like(v)
    result[rows] = out.unflatten(0, (-1, heads)).to(result.dtype)
    return result


def kda_output(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = o.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight * gate.float().sigmoid()
    return wide.flatten(1).to(o.dtype)


def _zeroed(slots: Tensor, fresh: Tensor, dims: int) -> Tensor:
    """[B, 1, ...] bool: the sequence starts from zero, as do padding sequences, which share the null slot."""
    return (fresh | (slots == 0)).view(-1, *[1] * (dims - 1))


def _time_major(cu_seqlens: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Sequences by falling length, their rows time after time, and how many sequences have a row at each time."""
    bounds = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(bounds)]
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    active = [sum(length > t for length in lengths) for t in range(max(lengths, default=0))]
    rows = [bounds[b] + t for t, count in enumerate(active) for b in order[:count]]
    device = cu_seqlens.device
    return torch.tensor(order, device=device, dtype=torch.long), torch.tensor(rows, device=device, dtype=torch.long), active
