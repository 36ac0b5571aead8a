"""KDA's two carried states: the short convolution's history and the recurrent matrix."""

import pytest
import torch

from kernels.registry import CANDIDATES, Candidate
from tests.lib import definitions
from tests.lib.conformance import (
    DEVICE,
    DTYPES,
    RAGGED,
    Data,
    assert_close,
    bounds_of,
    each,
    each_backend,
    each_mode,
    geometry,
    implementation,
)

STRIDED = {"dense": False, "strided": True}
SHAPES = {"narrow": (4, 32), "full width": (12, 128)}  # heads, dimension
SCANS = [(op, backend) for op in ("kda_extend", "kda_decode") for backend in CANDIDATES[op]]
each_scan = pytest.mark.parametrize(("op", "backend"), SCANS, ids=[f"{op}-{b.backend}" for op, b in SCANS])
NUM_SLOTS = 9


def slots_and_fresh(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots out of order; every second sequence starts here."""
    slots = torch.tensor([4, 2, 8, 1, 6][:count], dtype=torch.long, device=DEVICE)
    return slots, torch.arange(count, device=DEVICE) % 2 == 1


@each_backend("short_conv")
@each(dtype=DTYPES, lengths=RAGGED, channels={"narrow": 24, "full width": 4608}, strided=STRIDED)
def test_short_conv(backend: Candidate, dtype: torch.dtype, lengths: list[int], channels: int, strided: bool):
    op, data = implementation(backend, geometry(dtype)), Data(21, strided)
    x, weight = data.normal(sum(lengths), channels, dtype=dtype), data.normal(channels, 4)
    state = Data(22).normal(NUM_SLOTS, channels, 3, dtype=dtype)
    slots, fresh = slots_and_fresh(len(lengths))
    histories = [state[slot].clone() * (not new) for slot, new in zip(slots, fresh, strict=True)]
    before = state.clone()
    out = op(x, weight, state, slots, fresh, bounds_of(lengths))
    wanted, after = definitions.conv(x, weight, histories, lengths)
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    for slot, history in zip(slots, after, strict=True):
        assert torch.equal(state[slot], history.to(dtype))  # the history is copied, not computed
    others = [n for n in range(NUM_SLOTS) if n not in slots.tolist()]
    assert torch.equal(state[others], before[others])


@each_mode("kda")
@each(dtype=DTYPES, shape=SHAPES, strided=STRIDED)
def test_scan(op: str, backend: Candidate, lengths: list[int], dtype: torch.dtype, shape: tuple, strided: bool):
    heads, dim = shape
    function = implementation(backend, geometry(dtype, kda_heads=heads, kda_head_dim=dim))
    data = Data(23, strided)
    q, k, v, decay = (data.normal(sum(lengths), heads, dim, dtype=dtype) for _ in range(4))
    beta, a_log, dt_bias = data.normal(sum(lengths), heads, dtype=dtype), data.normal(heads), data.normal(heads, dim)
    state = Data(24).normal(NUM_SLOTS, heads, dim, dim)
    slots, fresh = slots_and_fresh(len(lengths))
    states = [state[slot].clone() * (not new) for slot, new in zip(slots, fresh, strict=True)]
    before = state.clone()
    out = function(q, k, v, decay, beta, a_log, dt_bias, -5.0, state, slots, fresh, bounds_of(lengths))
    wanted, after = definitions.kda(q, k, v, decay, beta, a_log, dt_bias, -5.0, states, lengths)
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    for slot, matrix, length in zip(slots, after, lengths, strict=True):
        if length:
            assert_close(state[slot], matrix, dtype)
    others = [n for n in range(NUM_SLOTS) if n not in slots.tolist()]
    assert torch.equal(state[others], before[others])


@each_scan
def test_scan_in_pieces_equals_one_scan(op: str, backend: Candidate):
    function, data = implementation(backend, geometry(kda_heads=4, kda_head_dim=32)), Data(25)
    q, k, v, decay = (data.normal(40, 4, 32) for _ in range(4))
    beta, a_log, dt_bias = data.normal(40, 4), data.normal(4), data.normal(4, 32)
    slot = torch.tensor([1], device=DEVICE)

    def run(state: torch.Tensor, pieces: list[int]) -> torch.Tensor:
        outs, first = [], 0
        for size in pieces:
            rows = slice(first, first + size)
            fresh = torch.tensor([first == 0], device=DEVICE)
            args = (a_log, dt_bias, -5.0, state, slot, fresh, bounds_of([size]))
            outs.append(function(q[rows], k[rows], v[rows], decay[rows], beta[rows], *args))
            first += size
        return torch.cat(outs)

    whole, parts = (torch.full((2, 4, 32, 32), float("nan"), device=DEVICE) for _ in range(2))
    assert_close(run(parts, [1, 7, 16, 15, 1]), run(whole, [40]), torch.float32)
    assert_close(parts[1], whole[1], torch.float32)


@each_scan
def test_padding_sequences_share_the_null_slot_and_keep_it_finite(op: str, backend: Candidate):
    function, data = implementation(backend, geometry(kda_heads=4, kda_head_dim=32)), Data(26)
    q, k, v, decay = (data.normal(3, 4, 32) for _ in range(4))
    beta, a_log, dt_bias = data.normal(3, 4), data.normal(4), data.normal(4, 32)
    state = data.normal(3, 4, 32, 32)
    state[0] = float("nan")  # nobody reads it
    lone = state.clone()
    slots, fresh = torch.tensor([0, 2, 0], device=DEVICE), torch.zeros(3, dtype=torch.bool, device=DEVICE)
    out = function(q, k, v, decay, beta, a_log, dt_bias, -5.0, state, slots, fresh, bounds_of([1, 1, 1]))
    args = (a_log, dt_bias, -5.0, lone, slots[1:2], fresh[:1], bounds_of([1]))
    alone = function(q[1:2], k[1:2], v[1:2], decay[1:2], beta[1:2], *args)
    assert out.isfinite().all() and state.isfinite().all()
    assert_close(out[1:2], alone, torch.float32)
    assert_close(state[2], lone[2], torch.float32)
    assert torch.equal(state[1], lone[1])


@each_backend("short_conv")
def test_short_conv_of_padding_sequences_keeps_the_null_slot_finite(backend: Candidate):
    op, data = implementation(backend, geometry()), Data(27)
    state = data.normal(2, 24, 3)
    state[0] = float("nan")
    slots, fresh = torch.zeros(4, dtype=torch.long, device=DEVICE), torch.zeros(4, dtype=torch.bool, device=DEVICE)
    out = op(data.normal(4, 24), data.normal(24, 4), state, slots, fresh, bounds_of([1, 1, 1, 1]))
    assert out.isfinite().all() and state.isfinite().all()


@each_backend("short_conv")
def test_the_last_tap_of_the_conv_is_the_current_row(backend: Candidate):
    op = implementation(backend, geometry())
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], device=DEVICE)
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], device=DEVICE)
    state, slots = torch.zeros(2, 2, 3, device=DEVICE), torch.tensor([1], device=DEVICE)
    out = op(x, weight, state, slots, torch.tensor([True], device=DEVICE), bounds_of([4]))
    silu = torch.nn.functional.silu(x)
    assert torch.equal(out[:, 0], silu[:, 0])
    assert out[:, 1].tolist() == [0.0, 0.0, 0.0, float(silu[0, 1])]
    assert state[1].tolist() == [[2.0, 3.0, 4.0], [2.0, 3.0, 4.0]]  # oldest first
