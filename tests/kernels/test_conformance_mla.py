"""Paged MLA: the cache write, and absorbed attention for prompt chunks and decode rounds."""

import pytest
import torch

from kernels.registry import CANDIDATES, Candidate
from tests.lib import definitions
from tests.lib.conformance import (
    DEVICE,
    DTYPES,
    Data,
    assert_close,
    bounds_of,
    each,
    each_backend,
    each_mode,
    geometry,
    implementation,
    paged,
)

SHAPES = {"narrow": (4, 32, 16), "full width": (12, 512, 64)}  # heads, latent, shared
STRIDED = {"dense": False, "strided": True}
ATTENTION = [(op, backend) for op in ("mla_extend", "mla_decode") for backend in CANDIDATES[op]]
each_attention = pytest.mark.parametrize(("op", "backend"), ATTENTION, ids=[f"{op}-{b.backend}" for op, b in ATTENTION])


@each_mode("mla")
@each(dtype=DTYPES, shape=SHAPES, strided=STRIDED)
def test_attention(op: str, backend: Candidate, lengths: list[int], dtype: torch.dtype, shape: tuple, strided: bool):
    heads, latent, shared = shape
    function = implementation(backend, geometry(dtype, mla_heads=heads, mla_latent=latent, mla_shared=shared))
    data = Data(11, strided)
    width = latent + shared
    q = data.normal(sum(lengths), heads, width, dtype=dtype)
    before = [0, 5, 127, 128, 300]  # rows that stood in the cache already
    rows = [data.normal(length + before[b], width, dtype=dtype) for b, length in enumerate(lengths)]
    cache, tables = paged(rows, width, dtype)
    contexts = torch.tensor([len(part) for part in rows], dtype=torch.int32, device=DEVICE)
    out = function(q, cache, tables, contexts, bounds_of(lengths), 0.07, latent)
    assert out.dtype == dtype
    assert_close(out, definitions.mla(q, rows, lengths, 0.07, latent), dtype)


@each_attention
def test_attention_leaves_padding_sequences_zero(op: str, backend: Candidate):
    function, data = implementation(backend, geometry(mla_heads=4, mla_latent=32, mla_shared=16)), Data(12)
    rows = [data.normal(200, 48)]
    cache, tables = paged(rows, 48, torch.float32)
    tables = torch.cat([torch.zeros_like(tables), tables, torch.zeros_like(tables)])
    q = data.normal(3, 4, 48)
    contexts = torch.tensor([0, 200, 0], dtype=torch.int32, device=DEVICE)
    out = function(q, cache, tables, contexts, bounds_of([1, 1, 1]), 0.1, 32)
    assert (out[0] == 0).all() and (out[2] == 0).all()
    assert_close(out[1:2], definitions.mla(q[1:2], rows, [1], 0.1, 32), torch.float32)


@each_backend("mla_extend")
def test_attention_over_a_long_chunk_is_causal_row_by_row(backend: Candidate):
    function, data = implementation(backend, geometry(mla_heads=2, mla_latent=32, mla_shared=16)), Data(13)
    rows = [data.normal(700, 48)]
    cache, tables = paged(rows, 48, torch.float32)
    q = data.normal(600, 2, 48, scale=3)
    contexts = torch.tensor([700], dtype=torch.int32, device=DEVICE)
    out = function(q, cache, tables, contexts, bounds_of([600]), 0.2, 32)
    assert_close(out, definitions.mla(q, rows, [600], 0.2, 32), torch.float32)


@each_backend("mla_write")
@each(dtype=DTYPES, strided=STRIDED)
def test_write_puts_each_row_at_its_slot_and_touches_nothing_else(backend: Candidate, dtype: torch.dtype, strided: bool):
    function, data = implementation(backend, geometry(dtype)), Data(14, strided)
    rows = data.normal(5, 576, dtype=dtype)
    slots = torch.tensor([3 * 128 + 7, 128, 2 * 128 - 1, 0, 0], device=DEVICE)  # two padding rows
    cache = torch.full((4, 128, 1, 576), 7.0, dtype=dtype, device=DEVICE)
    wanted = cache.clone().view(-1, 576)
    wanted[slots[:3]] = rows[:3]
    function(rows, slots, cache)
    flat = cache.view(-1, 576)
    assert torch.equal(flat[1:], wanted[1:])
    assert flat[0].isfinite().all()


@each_backend("mla_write")
def test_write_into_a_strided_pool_and_of_no_rows(backend: Candidate):
    function, data = implementation(backend, geometry(mla_latent=32, mla_shared=16)), Data(15)
    arena = torch.zeros(3, 2, 128, 1, 48, device=DEVICE)  # two layers' blocks side by side
    row = data.normal(1, 48)
    function(row, torch.tensor([2 * 128 + 5], device=DEVICE), arena[:, 1])
    function(row[:0], torch.zeros(0, dtype=torch.long, device=DEVICE), arena[:, 0])
    assert torch.equal(arena[2, 1, 5, 0], row[0])
    assert arena[:, 0].count_nonzero() == 0
    assert arena.count_nonzero() == 48


@each_backend("mla_block")
@each(dtype=DTYPES, shape=SHAPES, strided=STRIDED)
def test_every_row_of_a_block_sees_the_context_and_the_whole_block(
    backend: Candidate, dtype: torch.dtype, shape: tuple, strided: bool
):
    heads, latent, shared = shape
    function = implementation(backend, geometry(dtype, mla_heads=heads, mla_latent=latent, mla_shared=shared))
    data, width, lengths = Data(13, strided), latent + shared, [7, 7, 7]
    q = data.normal(21, heads, width, dtype=dtype)
    rows = [data.normal(7 + before, width, dtype=dtype) for before in (0, 125, 300)]
    cache, tables = paged(rows, width, dtype)
    contexts = torch.tensor([len(part) for part in rows], dtype=torch.int32, device=DEVICE)
    out = function(q, cache, tables, contexts, bounds_of(lengths), 0.07, latent)
    wanted = [definitions.mla(q[n : n + 1], [rows[n // 7]], [1], 0.07, latent) for n in range(21)]
    assert out.dtype == dtype
    assert_close(out, torch.cat(wanted), dtype)
