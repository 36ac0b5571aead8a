"""Kernels on a GPU at the shapes of a rank of Kimi K3 (TP8), against the float32 reference on the same inputs.

Beside the conformance suite (tests/kernels, which runs on the GPU where there is one): full rounds of unequal and padded
sequences, page boundaries, contexts of 128k rows, and captured graphs whose inputs change between replays. The tolerance is
the suite's for bfloat16: rounding of inputs and results, whose size does not grow with the context.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import CANDIDATES, REFERENCE, Candidate
from tests.lib.conformance import DEVICE, Data, assert_close, bounds_of, geometry, implementation, paged

pytestmark = pytest.mark.gpu(1)

BF16 = torch.bfloat16
SCALE, LATENT, WIDTH, HEADS, DIM = 192**-0.5, 512, 576, 12, 128
# Around pages of 64 rows and blocks of 128, one row, nothing but the window, long, and padding.
CONTEXTS = [8, 9, 63, 64, 65, 71, 72, 127, 128, 129, 135, 136, 191, 192, 193, 1000, 2047, 2048, 4097, 8192, 0, 0]


def fast(op: str):
    """Every backend of an op but the reference."""
    backends = [candidate for candidate in CANDIDATES[op] if candidate.backend != REFERENCE]
    return pytest.mark.parametrize("backend", backends, ids=lambda candidate: candidate.backend)


def both(op: str, backend: Candidate) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The backend's function, or skip with its reason; and the reference's."""
    return implementation(backend, geometry(BF16)), CANDIDATES[op][-1].implementation


def replayed(call: Callable[[], Any], change: Callable[[], None]) -> Any:
    """What `call`, captured, returns when it is replayed after its inputs were changed in place."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiled before it is captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return out


class Cached:
    """Sequences in the paged cache; the null block is as finite and as wrong as padding leaves it."""

    def __init__(self, contexts: list[int], rows: int):
        data = Data(51)
        self.cache, self.tables = paged([data.normal(length, WIDTH, dtype=BF16) for length in contexts], WIDTH, BF16)
        self.cache[0] = 7
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.bounds = bounds_of([rows] * len(contexts))
        self.q = data.normal(rows * len(contexts), HEADS, WIDTH, dtype=BF16)

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.cache, self.tables, self.contexts, self.bounds, SCALE, LATENT


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("op", ["mla_decode", "mla_block"])
@fast("mla_decode")
def test_attention_of_unequal_and_padding_sequences_over_page_boundaries(op: str, backend: Candidate, rows: int):
    (function, reference), it = both(op, _of(op, backend)), Cached(CONTEXTS, rows)
    out = function(*it.arguments())
    assert_close(out, reference(*it.arguments()), BF16)
    assert (out[-2 * rows :] == 0).all()


@fast("mla_decode")
def test_attention_over_128k_rows(backend: Candidate):
    (function, reference), it = both("mla_decode", backend), Cached([131072, 100], 8)
    assert_close(function(*it.arguments()), reference(*it.arguments()), BF16)


@pytest.mark.parametrize("lengths", [[512], [100, 0, 1, 300, 17]], ids=["one chunk", "ragged"])
@fast("mla_extend")
def test_attention_of_prompt_chunks_after_a_long_prefix(backend: Candidate, lengths: list[int]):
    function, reference = both("mla_extend", backend)
    before = [130560, 0, 127, 64, 1000][: len(lengths)]
    it = Cached([had + length for had, length in zip(before, lengths, strict=True)], 1)
    it.q, it.bounds = Data(52).normal(sum(lengths), HEADS, WIDTH, dtype=BF16), bounds_of(lengths)
    assert_close(function(*it.arguments()), reference(*it.arguments()), BF16)


@fast("mla_decode")
def test_a_captured_attention_follows_its_lengths_and_tables(backend: Candidate):
    (function, _), it = both("mla_decode", backend), Cached(CONTEXTS, 8)

    def change() -> None:
        it.contexts.copy_(it.contexts.roll(5))
        it.tables.copy_(it.tables.roll(5, 0))
        it.q.neg_()

    out = replayed(lambda: function(*it.arguments()), change)
    assert torch.equal(out, function(*it.arguments()))


def _of(op: str, backend: Candidate) -> Candidate:
    """The same backend's candidate for another op."""
    return next(candidate for candidate in CANDIDATES[op] if candidate.backend == backend.backend)


class Recurrence:
    """A round of `width` rows of 32 places, four of them padding, in slots out of order."""

    def __init__(self, width: int, places: int = 32):
        data = Data(53)
        rows = places * width
        self.width, self.bounds = width, bounds_of([width] * places)
        self.qkv, self.decay = data.normal(rows, 3 * HEADS * DIM, dtype=BF16), data.normal(rows, HEADS, DIM, dtype=BF16)
        self.beta, self.weight = data.normal(rows, HEADS, dtype=BF16), data.normal(3 * HEADS * DIM, 4)
        self.constants = (data.normal(HEADS), data.normal(HEADS, DIM), -5.0)
        self.state, self.conv = data.normal(40, HEADS, DIM, DIM), data.normal(40, 3 * HEADS * DIM, 3, dtype=BF16)
        order = torch.randperm(39, generator=torch.Generator().manual_seed(3)).add(1)[:places]
        order[[3, 4, 9, 31]] = 0
        self.slots = order.to(DEVICE)
        self.fresh = torch.zeros(places, dtype=torch.bool, device=DEVICE)
        self.accepted = torch.arange(places, device=DEVICE) % width + 1

    def rows(self) -> tuple[Any, ...]:
        q, k, v = self.qkv.unflatten(-1, (3, HEADS, DIM)).unbind(1)
        return q, k, v, self.decay, self.beta, *self.constants

    def live(self, x: Tensor) -> Tensor:
        """The rows of places that are no padding."""
        return x.unflatten(0, (-1, self.width))[self.slots != 0]


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@fast("kda_verify")
def test_verify_of_a_full_round_leaves_every_state_alone(backend: Candidate, width: int):
    (function, reference), it = both("kda_verify", backend), Recurrence(width)
    before = it.state.clone()
    out = function(*it.rows(), it.state, it.slots, it.bounds)
    assert_close(it.live(out), it.live(reference(*it.rows(), it.state, it.slots, it.bounds)), BF16)
    assert out.isfinite().all() and torch.equal(it.state, before)


@pytest.mark.parametrize("width", [1, 8])
@fast("kda_decode")
def test_a_decode_scan_of_a_full_round(backend: Candidate, width: int):
    (function, reference), it = both("kda_decode", backend), Recurrence(width)
    other = it.state.clone()
    out = function(*it.rows(), it.state, it.slots, it.fresh, it.bounds)
    wanted = reference(*it.rows(), other, it.slots, it.fresh, it.bounds)
    assert_close(it.live(out), it.live(wanted), BF16)
    assert_close(it.state[1:], other[1:], BF16)


@fast("kda_commit")
def test_commit_of_a_full_round_moves_each_place_by_its_own_rows(backend: Candidate):
    (function, reference), it = both("kda_commit", backend), Recurrence(8)
    state, conv = it.state.clone(), it.conv.clone()

    def commit(op: Callable[..., Any], state: Tensor, conv: Tensor) -> None:
        arguments = (it.qkv, it.weight, conv, it.decay, it.beta, *it.constants, state, it.slots, it.bounds, it.accepted)
        op(*arguments)

    commit(function, it.state, it.conv)
    commit(reference, state, conv)
    assert torch.equal(it.conv[1:], conv[1:])
    assert_close(it.state[1:], state[1:], torch.float32)


@fast("kda_commit")
def test_a_captured_round_follows_slots_and_accepted_counts(backend: Candidate):
    """Verify and commit, as a layer of a decode round has them."""
    verify, commit = both("kda_verify", _of("kda_verify", backend))[0], both("kda_commit", backend)[0]
    it, other = Recurrence(8), Recurrence(8)

    def round_of(it: Recurrence) -> Tensor:
        out = verify(*it.rows(), it.state, it.slots, it.bounds)
        history = (it.qkv, it.weight, it.conv, it.decay, it.beta, *it.constants)
        commit(*history, it.state, it.slots, it.bounds, it.accepted)
        return out

    def change(it: Recurrence) -> None:
        it.slots.copy_(it.slots.roll(7))
        it.accepted.copy_(9 - it.accepted)
        it.qkv.neg_()
        it.state.copy_(start)
        it.conv.copy_(start_conv)

    start, start_conv = it.state.clone(), it.conv.clone()
    out = replayed(lambda: round_of(it), lambda: change(it))
    change(other)
    assert torch.equal(it.live(out), other.live(round_of(other)))
    assert torch.equal(it.state, other.state) and torch.equal(it.conv, other.conv)


@pytest.mark.parametrize("lengths", [[2048], [700, 0, 1, 513, 16]], ids=["one chunk", "ragged"])
@fast("kda_extend")
def test_a_scan_of_prompt_chunks(backend: Candidate, lengths: list[int]):
    function, reference = both("kda_extend", backend)
    it, rows, count = Recurrence(1), sum(lengths), len(lengths)
    data = Data(54)
    q, k, v, decay = (data.normal(rows, HEADS, DIM, dtype=BF16) for _ in range(4))
    arguments = (q, k, v, decay, data.normal(rows, HEADS, dtype=BF16), *it.constants)
    slots, fresh = torch.arange(5, 5 + count, device=DEVICE), torch.arange(count, device=DEVICE) == 3
    other = it.state.clone()
    out = function(*arguments, it.state, slots, fresh, bounds_of(lengths))
    assert_close(out, reference(*arguments, other, slots, fresh, bounds_of(lengths)), BF16)
    assert_close(it.state, other, BF16)


@fast("router")
def test_the_router_chooses_as_the_reference_where_scores_crowd_together(backend: Candidate):
    """A bias that favours few experts; scores whose neighbours are nearly equal."""
    (function, reference), data = both("router", backend), Data(55)
    x, weight = data.normal(1024, 7168, dtype=BF16), data.normal(896, 7168, dtype=BF16, scale=7168**-0.5)
    bias = torch.where(torch.arange(896, device=DEVICE) % 56 == 0, 2.0, 0.0)
    ids, weights = function(x, weight, bias, 16, True, 1.0)
    wanted_ids, wanted_weights = reference(x, weight, bias, 16, True, 1.0)
    different = (ids != wanted_ids).float().mean()
    assert different < 1e-3, "two scores within float32's rounding may change places"
    assert_close(weights, wanted_weights, BF16 if different else torch.float32)
