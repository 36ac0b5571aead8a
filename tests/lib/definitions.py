"""Every op once more, straight from the specification: float64, row by row, with no thought of speed. What backends are
compared with, the reference backend included."""

import math

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def mix(blocks: Tensor, prefix: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = []
    for row in range(prefix.shape[0]):
        candidates = [block[row].double() for block in blocks] + [prefix[row].double()]
        scores = torch.stack([(rms(v, torch.ones_like(v), eps) * weight.double()).sum() for v in candidates])
        rows.append(sum(p * v for p, v in zip(torch.softmax(scores, 0), candidates, strict=True)))
    return torch.stack(rows) if rows else prefix.double()


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate.double(), up.double()
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * linear_beta * torch.tanh(up / linear_beta)


def mla(q: Tensor, rows: list[Tensor], lengths: list[int], scale: float, latent: int) -> Tensor:
    """rows[b] [context, L+R]: the sequence's cached rows, the last `lengths[b]` of them this batch's."""
    out, first = [], 0
    for cached, length in zip(rows, lengths, strict=True):
        for row in range(length):
            seen = cached[: cached.shape[0] - length + row + 1].double()
            weights = torch.softmax(q[first + row].double() @ seen.T * scale, -1)
            out.append(weights @ seen[:, :latent])
        first += length
    return torch.stack(out) if out else q.new_zeros(0, q.shape[1], latent, dtype=torch.float64)


def conv(x: Tensor, weight: Tensor, histories: list[Tensor], lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """histories[b] [C, W-1] -> rows and the new histories."""
    out, after, first = [], [], 0
    for history, length in zip(histories, lengths, strict=True):
        inputs = torch.cat([history.double().T, x[first : first + length].double()])
        for row in range(length):
            y = (inputs[row : row + weight.shape[1]] * weight.double().T).sum(0)
            out.append(y / (1 + torch.exp(-y)))
        after.append(inputs[inputs.shape[0] - weight.shape[1] + 1 :].T)
        first += length
    return torch.stack(out) if out else x.double(), after


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    states: list[Tensor],
    lengths: list[int],
) -> tuple[Tensor, list[Tensor]]:
    """states[b] [H, key, value] -> rows and the new states."""
    out, after, first = [], [], 0
    rate = torch.exp(a_log.double())
    for state, length in zip(states, lengths, strict=True):
        s = state.double()
        for row in range(first, first + length):
            qn, kn = (x[row].double() / (x[row].double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            qn = qn / math.sqrt(q.shape[-1])
            log_decay = lower_bound / (1 + torch.exp(-rate[:, None] * (decay[row].double() + dt_bias.double())))
            s = torch.exp(log_decay)[:, :, None] * s
            prediction = torch.einsum("hkv,hk->hv", s, kn)
            error = (v[row].double() - prediction) / (1 + torch.exp(-beta[row].double()))[:, None]
            s = s + torch.einsum("hk,hv->hkv", kn, error)
            out.append(torch.einsum("hkv,hk->hv", s, qn))
        after.append(s)
        first += length
    return torch.stack(out) if out else v.double(), after


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms(o, weight, eps) / (1 + torch.exp(-gate.double()))).flatten(1)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
    scores = 1 / (1 + torch.exp(-(x.double() @ weight.double().T)))
    ids = torch.zeros(x.shape[0], top_k, dtype=torch.long)
    for row, choice in enumerate((scores.cpu() + bias.double().cpu()).tolist()):
        ids[row] = torch.tensor(sorted(range(len(choice)), key=lambda e: (-choice[e], e))[:top_k])
    ids = ids.to(x.device)
    weights = torch.gather(scores, 1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scaling


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """One matrix [out, in / 2] with scales [out, in / 32] -> [out, in]."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64, device=packed.device)
    for column, nibble in ((0, packed & 15), (1, packed >> 4)):
        out[:, column::2] = table[(nibble & 7).int()] * torch.where(nibble > 7, -1.0, 1.0)
    return out * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, dim=1)


def expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, beta: float, linear_beta: float) -> Tensor:
    """x [n, latent]; dequantised matrices [out, in] -> [n, latent], unweighted."""
    x = x.double()
    return situ(x @ w1.T, x @ w3.T, beta, linear_beta) @ w2.T
