"""The KDA recurrence over whole sequences at once, differentiable (spec k3-model §6).

A sequence is cut into chunks of CHUNK tokens. With G the running sum of log decays inside a chunk, K' = k e^G and K- = k e^-G:

    (I + A) U = beta (V - K' S)      A = tril(beta K' K-^T, -1)       U: what each token writes
    O = q e^G S + tril(q e^G K-^T) U
    S' = e^G_last S + (k e^(G_last - G))^T U

All of it is parallel over chunks except the line of states, which StateScan walks, forwards and backwards. The decay is at
least e^-5 a token, so e^(5 CHUNK) bounds every factor: 16 tokens stay inside float32's range.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.device import compiled

CHUNK = 16


def kda_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """q, k (normalised, q scaled), v, log_decay [B, T, H, D], beta [B, T, H] -> [B, T, H, D] float32, from a zero state."""
    with torch.autocast(q.device.type, enabled=False):
        written, seen, keys, decay, read, inside = _before(q, k, v, log_decay, beta)
        states, writes = StateScan.apply(written, seen, keys, decay)
        out = _after(read, states, inside, writes, q.shape[0])
    return out[:, : q.shape[1]]


@compiled
def _before(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """StateScan's arguments, and what its results are read with; all [N, B * H, ...] float32."""
    batch, tokens, heads, _ = q.shape
    padding = -tokens % CHUNK

    def chunked(x: Tensor) -> Tensor:
        """-> [N, B * H, CHUNK, D]"""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, CHUNK))
        return x.permute(1, 0, 3, 2, 4).reshape(-1, batch * heads, CHUNK, x.shape[-1])

    q, k, v, g, rate = chunked(q), chunked(k), chunked(v), chunked(log_decay), chunked(beta.unsqueeze(-1))
    g = g.cumsum(2)
    last = g[:, :, -1:]
    grown, shrunk, read = k * g.exp(), k * (-g).exp(), q * g.exp()
    inverse = _unit_lower_inverse((rate * (grown @ shrunk.mT)).tril(-1))
    inside = (read @ shrunk.mT).tril()
    return inverse @ (rate * v), inverse @ (rate * grown), k * (last - g).exp(), last.exp().mT, read, inside


@compiled
def _after(read: Tensor, states: Tensor, inside: Tensor, writes: Tensor, batch: int) -> Tensor:
    """-> [B, N * CHUNK, H, D]"""
    out = (read @ states + inside @ writes).unflatten(1, (batch, -1))
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., 16, 16]: (I - a)(I + a^2)(I + a^4)(I + a^8)."""
    identity = torch.eye(CHUNK, device=a.device)
    power, inverse = a, identity - a
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


class StateScan(torch.autograd.Function):
    """S_0 = 0, U_n = written_n - seen_n S_n, S_{n+1} = decay_n S_n + keys_n^T U_n; returns all S_n and U_n."""

    @staticmethod
    def forward(ctx: Any, written: Tensor, seen: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """written, seen, keys [N, M, C, D]; decay [N, M, D, 1] -> [N, M, D, D], [N, M, C, D]."""
        count, rows, _, dim = written.shape
        states = written.new_zeros(count + 1, rows, dim, dim)
        writes = torch.empty_like(written)
        for n in range(count):
            torch.baddbmm(written[n], seen[n], states[n], alpha=-1, out=writes[n])
            torch.mul(states[n], decay[n], out=states[n + 1])
            states[n + 1].baddbmm_(keys[n].mT, writes[n])
        ctx.save_for_backward(seen, keys, decay, states, writes)
        return states[:-1], writes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        seen, keys, decay, states, writes = ctx.saved_tensors
        d_states, d_writes = gradients
        d_writes = d_writes.clone()
        after = torch.zeros_like(states)  # gradient of S_{n+1}, at [n]
        for n in reversed(range(len(seen))):
            d_writes[n].baddbmm_(keys[n], after[n])
            if n:
                torch.addcmul(d_states[n], after[n], decay[n], out=after[n - 1])
                after[n - 1].baddbmm_(seen[n].mT, d_writes[n], alpha=-1)
        after, before = after[:-1], states[:-1]
        return d_writes, -d_writes @ before.mT, writes @ after.mT, (after * before).sum(-1, keepdim=True)
