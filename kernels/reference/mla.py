"""Multi-head latent attention over the paged cache, absorbed form (spec k3-model §4)."""

import torch
from torch import Tensor

from kernels.ops import BLOCK_ROWS, Plans

QUERY_ROWS = 256  # rows scored at once: bounds the score matrix, and skips keys that none of them sees


def mla_write(rows: Tensor, write_slots: Tensor, cache: Tensor) -> None:
    cache[write_slots // BLOCK_ROWS, write_slots % BLOCK_ROWS, 0] = rows.to(cache.dtype)


def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    return _attend(q, cache, block_tables, context_lens, cu_seqlens, scale, latent, causal=True)


def mla_block(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    return _attend(q, cache, block_tables, context_lens, cu_seqlens, scale, latent, causal=False)


def _attend(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    causal: bool,
) -> Tensor:
    out = q.new_zeros(*q.shape[:2], latent)
    bounds, contexts = cu_seqlens.tolist(), context_lens.tolist()
    for sequence, context in enumerate(contexts):
        first, last = bounds[sequence], bounds[sequence + 1]
        if context == 0:
            continue
        blocks = block_tables[sequence, : -(-context // BLOCK_ROWS)].long()
        keys = cache[blocks, :, 0].flatten(0, 1)[:context].float()
        for start in range(first, last, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, last)
            seen = context - (last - stop) * causal  # keys that the last of these rows sees
            scores = (q[start:stop].float() @ keys[:seen].T) * scale  # [rows, H, seen]
            if causal:
                position = torch.arange(seen - (stop - start), seen, device=q.device).view(-1, 1, 1)
                scores.masked_fill_(torch.arange(seen, device=q.device) > position, float("-inf"))
            out[start:stop] = (scores.softmax(-1) @ keys[:seen, :latent]).to(q.dtype)
    return out
