"""Absorbed MLA by FlashMLA's dense decode kernel (spec k3-model §4).

A decode round is what the kernel was made for. A prompt chunk is cut into queries of 16 rows, each with its own count of
visible keys: 16 rows of 12 heads are three of the kernel's tiles, nothing is padded but the end of a sequence, and keys that
no row of a query sees are not read. How the keys are divided among multiprocessors is planned on the device, so a captured
graph follows the lengths; a plan takes up to 30 us of an H200, a third of a round's attention, and is made once for all layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from kernels.flash_mla.pages import Cut, cut, page_tables, pages_of
from kernels.ops import Plans

QUERY_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one pass share."""

    tables: Tensor  # [B, 2 M] pages
    seen: Tensor  # [B] keys that the last row of each query sees
    schedule: Any  # the library's, filled by its first use
    cut: Cut | None = None  # of a prompt chunk


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    return _equal_rows(q, cache, block_tables, context_lens, scale, latent, plans, causal=True)


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
    return _equal_rows(q, cache, block_tables, context_lens, scale, latent, plans, causal=False)


def mla_extend(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    if not len(q):
        return q.new_empty(*q.shape[:2], latent)
    pages, step = pages_of(cache)

    def make() -> _Plan:
        it = cut(len(q), block_tables, context_lens, cu_seqlens, step, QUERY_ROWS)
        return _Plan(it.tables, it.seen, get_mla_metadata()[0], it)

    plan = _shared(plans, f"flash_mla.extend.{step}", make)
    assert plan.cut is not None
    out = _attend(plan.cut.spread(q), pages, plan, scale, latent, causal=True)
    return out.flatten(0, 1)[plan.cut.places]


def _equal_rows(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None,
    causal: bool,
) -> Tensor:
    if not len(q):
        return q.new_empty(*q.shape[:2], latent)
    pages, step = pages_of(cache)

    def make() -> _Plan:
        return _Plan(page_tables(block_tables, step), context_lens, get_mla_metadata()[0])

    plan = _shared(plans, f"flash_mla.{'decode' if causal else 'block'}.{step}", make)
    queries = q.contiguous().unflatten(0, (len(context_lens), -1))
    return _attend(queries, pages, plan, scale, latent, causal).flatten(0, 1)


def _shared(plans: Plans | None, key: str, make: Callable[[], _Plan]) -> _Plan:
    if plans is None:
        return make()
    if key not in plans:
        plans[key] = make()
    return plans[key]


def _attend(q: Tensor, pages: Tensor, plan: _Plan, scale: float, latent: int, causal: bool) -> Tensor:
    """q [B, rows, H, W] -> [B, rows, H, latent]."""
    return flash_mla_with_kvcache(q, pages, plan.tables, plan.seen, latent, plan.schedule, None, scale, causal)[0]
