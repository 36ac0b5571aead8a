"""Absorbed MLA by FlashMLA's dense decode kernel (spec k3-model §4).

A decode round is what the kernel was made for. A prompt chunk is cut into queries of 16 rows, each with its own count of
visible keys: 16 rows of 12 heads are three of the kernel's tiles, nothing is padded but the end of a sequence, and keys that
no row of a query sees are not read. How the keys are divided among multiprocessors is planned by the kernel on the device,
anew in each call, so that a captured graph follows the lengths.
"""

from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from kernels.flash_mla.pages import cut, page_tables, pages_of

QUERY_ROWS = 16


def mla_decode(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, scale: float, latent: int
) -> Tensor:
    return _equal_rows(q, cache, block_tables, context_lens, scale, latent, causal=True)


def mla_block(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, scale: float, latent: int
) -> Tensor:
    return _equal_rows(q, cache, block_tables, context_lens, scale, latent, causal=False)


def mla_extend(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, scale: float, latent: int
) -> Tensor:
    if not len(q):
        return q.new_empty(*q.shape[:2], latent)
    pages, step = pages_of(cache)
    queries, tables, seen, places = cut(q, block_tables, context_lens, cu_seqlens, step, QUERY_ROWS)
    out = _attend(queries, pages, tables, seen, scale, latent, causal=True)
    return out.flatten(0, 1)[places]


def _equal_rows(
    q: Tensor, cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float, latent: int, causal: bool
) -> Tensor:
    if not len(q):
        return q.new_empty(*q.shape[:2], latent)
    pages, step = pages_of(cache)
    queries = q.contiguous().unflatten(0, (len(context_lens), -1))
    return _attend(queries, pages, page_tables(block_tables, step), context_lens, scale, latent, causal).flatten(0, 1)


def _attend(q: Tensor, pages: Tensor, tables: Tensor, seen: Tensor, scale: float, latent: int, causal: bool) -> Tensor:
    """q [B, rows, H, W] -> [B, rows, H, latent]."""
    plan, _ = get_mla_metadata()
    return flash_mla_with_kvcache(q, pages, tables, seen, latent, plan, None, scale, causal)[0]
