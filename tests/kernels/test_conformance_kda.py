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
    assert_close(out[:, 0], silu[:, 0], torch.float32)
    assert_close(out[:, 1], torch.cat([torch.zeros(3, device=DEVICE), silu[:1, 1]]), torch.float32)
    assert state[1].tolist() == [[2.0, 3.0, 4.0], [2.0, 3.0, 4.0]]  # oldest first


ACCEPTED = {"one row": [1, 1, 1], "all rows": [8, 8, 8], "mixed": [3, 1, 8]}


def verify_inputs(dtype: torch.dtype, heads: int, dim: int, strided: bool):
    """Three sequences of 8 rows: before the convolution, and the scan's other arguments."""
    data = Data(28, strided)
    qkv, decay = data.normal(24, 3 * heads * dim, dtype=dtype), data.normal(24, heads, dim, dtype=dtype)
    beta = data.normal(24, heads, dtype=dtype)
    weight, a_log, dt_bias = data.normal(3 * heads * dim, 4), data.normal(heads), data.normal(heads, dim)
    conv, state = Data(29).normal(NUM_SLOTS, 3 * heads * dim, 3, dtype=dtype), Data(30).normal(NUM_SLOTS, heads, dim, dim)
    return qkv, weight, conv, decay, beta, a_log, dt_bias, state


@each_backend("kda_verify")
@each(dtype=DTYPES, shape=SHAPES, strided=STRIDED)
def test_verify_gives_the_rows_of_a_decode_scan_and_leaves_the_state_alone(
    backend: Candidate, dtype: torch.dtype, shape: tuple, strided: bool
):
    heads, dim = shape
    wanted = geometry(dtype, kda_heads=heads, kda_head_dim=dim)
    verify, bounds = implementation(backend, wanted), bounds_of([8, 8, 8])
    qkv, _, _, decay, beta, a_log, dt_bias, state = verify_inputs(dtype, heads, dim, strided)
    q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(1)
    slots, before = torch.tensor([4, 2, 8], device=DEVICE), state.clone()
    out = verify(q, k, v, decay, beta, a_log, dt_bias, -5.0, state, slots, bounds)
    rows, _ = definitions.kda(q, k, v, decay, beta, a_log, dt_bias, -5.0, [before[slot] for slot in slots], [8, 8, 8])
    assert out.dtype == dtype
    assert_close(out, rows, dtype)
    assert torch.equal(state, before)


@each_backend("short_conv_verify")
@each(dtype=DTYPES, strided=STRIDED)
def test_conv_verify_gives_the_rows_of_a_convolution_and_leaves_the_history_alone(
    backend: Candidate, dtype: torch.dtype, strided: bool
):
    verify = implementation(backend, geometry(dtype))
    qkv, weight, conv, *_ = verify_inputs(dtype, 4, 32, strided)
    slots, before = torch.tensor([4, 2, 8], device=DEVICE), conv.clone()
    out = verify(qkv, weight, conv, slots, bounds_of([8, 8, 8]))
    rows, _ = definitions.conv(qkv, weight, [before[slot] for slot in slots], [8, 8, 8])
    assert out.dtype == dtype
    assert_close(out, rows, dtype)
    assert torch.equal(conv, before)


@each_backend("kda_commit")
@each(dtype=DTYPES, shape=SHAPES, strided=STRIDED, accepted=ACCEPTED)
def test_commit_moves_both_states_on_by_the_accepted_rows_alone(
    backend: Candidate, dtype: torch.dtype, shape: tuple, strided: bool, accepted: list[int]
):
    heads, dim = shape
    commit = implementation(backend, geometry(dtype, kda_heads=heads, kda_head_dim=dim))
    qkv, weight, conv, decay, beta, a_log, dt_bias, state = verify_inputs(dtype, heads, dim, strided)
    slots, old_conv, old_state = torch.tensor([4, 2, 8], device=DEVICE), conv.clone(), state.clone()
    taken = torch.tensor(accepted, device=DEVICE)
    commit(qkv, weight, conv, decay, beta, a_log, dt_bias, -5.0, state, slots, bounds_of([8, 8, 8]), taken)
    for n, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
        rows = slice(8 * n, 8 * n + count)
        convolved, (history,) = definitions.conv(qkv[rows], weight, [old_conv[slot]], [count])
        q, k, v = convolved.to(dtype).unflatten(-1, (3, heads, dim)).unbind(1)
        _, (wanted,) = definitions.kda(q, k, v, decay[rows], beta[rows], a_log, dt_bias, -5.0, [old_state[slot]], [count])
        assert torch.equal(conv[slot], history.to(dtype))
        assert_close(state[slot], wanted, dtype)
    others = [n for n in range(NUM_SLOTS) if n not in slots.tolist()]
    assert torch.equal(state[others], old_state[others]) and torch.equal(conv[others], old_conv[others])


@each_backend("kda_commit")
def test_commit_skips_padding_sequences(backend: Candidate):
    commit = implementation(backend, geometry(kda_heads=4, kda_head_dim=32))
    qkv, weight, conv, decay, beta, a_log, dt_bias, state = verify_inputs(torch.float32, 4, 32, False)
    lone_conv, lone_state = conv.clone(), state.clone()
    state[0], conv[0] = float("nan"), float("nan")
    slots, taken = torch.tensor([0, 2, 0], device=DEVICE), torch.tensor([8, 3, 1], device=DEVICE)
    commit(qkv, weight, conv, decay, beta, a_log, dt_bias, -5.0, state, slots, bounds_of([8, 8, 8]), taken)
    rows, bounds = slice(8, 16), bounds_of([8])
    one, three = torch.tensor([2], device=DEVICE), torch.tensor([3], device=DEVICE)
    args = (decay[rows], beta[rows], a_log, dt_bias, -5.0)
    commit(qkv[rows], weight, lone_conv, *args, lone_state, one, bounds, three)
    assert torch.equal(conv[1:], lone_conv[1:])
    assert_close(state[1:], lone_state[1:], torch.float32)
