"""What `k3mesh bench kernels` times: each op as a rank of Kimi K3 calls it (TP8, EP32), in decode rounds and prompt chunks.

A case's floor is the larger of its bytes over the copy ceiling and its operations over the matrix ceiling. Bytes are the
fewest that the op can move: each input read once, each output written once. What the product finds in memory rather than in
the L2 cache (weights, states, caches, blocks of other layers) comes in so many sets that a call never finds its own there;
rows that the op before has just written are one set.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import BLOCK_ROWS, OpGeometry, Plans

COLD_BYTES = 256 << 20  # of all sets together: several times an L2 cache
BF16 = torch.bfloat16

K3_RANK = OpGeometry(
    dtype=BF16,
    cache_dtype=BF16,
    hidden=7168,
    mla_heads=12,
    mla_latent=512,
    mla_shared=64,
    kda_heads=12,
    kda_head_dim=128,
    conv_width=4,
    num_experts=896,
    local_experts=28,
    top_k=16,
    moe_latent=3584,
    moe_inner=3072,
)
LINEAR = "linear"  # not an op: the library's matrix product, for the sum over a layer

# A decode round's requests and rows of each, the cache rows of a request, and a prompt chunk's rows.
REQUESTS, WIDTH, CONTEXT, CHUNK = 32, 8, 8192, 8192
ROUND = REQUESTS * WIDTH
SLICE = ROUND // 8  # rows that a TP rank routes
ROUND_LAYERS, STAGE_LAYERS = 24, 6  # MLA layers of a decode round, and of a prefill stage

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One op on inputs of one shape."""

    op: str
    what: str
    bytes: int
    flops: int
    prepare: Callable[[Callable[..., Any], torch.device], list[Call]]  # the implementation -> one call for each set of inputs
    bar: float | None = None  # time over floor that is promised on an H200
    kda: int = 0  # calls in a KDA layer of a verify round
    mla: int = 0  # calls in an MLA layer of one
    layers: int = 1  # that a call runs, one after the other: what they share is made once
    geometry: OpGeometry = K3_RANK

    @property
    def name(self) -> str:
        return f"{self.op}: {self.what}"


class Inputs:
    """Random inputs on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._generator).mul_(scale).to(dtype)

    def bounds(self, sequences: int, rows: int) -> Tensor:
        return torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32, device=self.device)

    def full(self, size: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.device)

    def slots(self, number: int) -> Tensor:
        """Of the number-th set of REQUESTS requests."""
        return torch.arange(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS, device=self.device)


def sets(size: int) -> int:
    """So many sets of `size` bytes that none is found in the L2 cache."""
    return -(-COLD_BYTES // size)


def op_cases() -> Iterator[Case]:
    """All but the routed experts, which expert_cases has."""
    yield from row_cases()
    yield from mla_cases()
    yield from kda_cases()
    yield from linear_cases()


# ---- row by row


def row_cases() -> Iterator[Case]:
    for rows, width, kda, mla in (
        (ROUND, 7168, 2, 2),
        (ROUND, 3584, 1, 1),
        (ROUND, 1536, 0, 1),
        (ROUND, 512, 0, 1),
        (CHUNK, 7168, 0, 0),
    ):
        yield Case("rms_norm", f"{rows} x {width}", 4 * rows * width, 0, _norm(rows, width), kda=kda, mla=mla)
    for rows, calls in ((ROUND, 2), (CHUNK, 0)):
        size = 2 * 10 * rows * 7168
        yield Case("attn_res_mix", f"{rows} rows, 8 blocks", size, 0, _mix(rows, 8), kda=calls, mla=calls)
    for rows, calls in ((ROUND, 1), (CHUNK, 0)):
        yield Case("situ_mul", f"{rows} x 768", 2 * 3 * rows * 768, 0, _situ(rows, 768), kda=calls, mla=calls)
    for rows, calls in ((SLICE, 1), (CHUNK // 8, 0)):
        size, flops = 2 * (rows + 896) * 7168 + rows * 16 * 12, 2 * rows * 896 * 7168
        yield Case("router", f"{rows} rows, 16 of 896", size, flops, _router(rows), kda=calls, mla=calls)


def _norm(rows: int, width: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        x, weight = data.normal(rows, width), data.normal(width, dtype=torch.float32)
        return [lambda: op(x, weight, 1e-5)]

    return prepare


def _mix(rows: int, blocks: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        weight = data.normal(7168, dtype=torch.float32, scale=7168**-0.5)

        def call(closed: Tensor, prefix: Tensor) -> Call:
            return lambda: op(closed, prefix, weight, 1e-5)

        return [call(data.normal(blocks, rows, 7168), data.normal(rows, 7168)) for _ in range(sets(2 * blocks * rows * 7168))]

    return prepare


def _situ(rows: int, inner: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        gate_up = Inputs(device).normal(rows, 2 * inner)
        return [lambda: op(gate_up, 4.0, 25.0)]

    return prepare


def _router(rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        x, bias = data.normal(rows, 7168), data.normal(896, dtype=torch.float32, scale=0.1)

        def call(weight: Tensor) -> Call:
            return lambda: op(x, weight, bias, 16, True, 1.0)

        return [call(data.normal(896, 7168, scale=7168**-0.5)) for _ in range(sets(2 * 896 * 7168))]

    return prepare


# ---- MLA


def mla_cases() -> Iterator[Case]:
    yield Case("mla_write", f"{ROUND} rows", 4 * ROUND * 576, 0, _write, mla=1)
    for requests, rows, context, bar, calls in (
        (REQUESTS, WIDTH, CONTEXT, 2.0, 1),
        (REQUESTS, 1, CONTEXT, 1.3, 0),
        (1, WIDTH, 131072, None, 0),
    ):
        yield _attention("mla_decode", requests, rows, context, ROUND_LAYERS, bar, calls)
    yield _attention("mla_block", REQUESTS, WIDTH - 1, CONTEXT, 1)
    for context in (CHUNK, 16 * CHUNK):
        yield _attention("mla_extend", 1, CHUNK, context, STAGE_LAYERS)


def _attention(op: str, requests: int, rows: int, context: int, layers: int, bar: float | None = None, calls: int = 0) -> Case:
    what = f"{requests} x {rows:,} rows, {context:,} in the cache"
    size, flops = _attention_cost(requests, rows, context)
    prepare = _attention_calls(requests, rows, context, layers)
    return Case(op, what, size, flops, prepare, bar, mla=calls, layers=layers)


def _attention_cost(requests: int, rows: int, context: int) -> tuple[int, int]:
    """Bytes, and operations over the keys that each row sees."""
    size = 2 * requests * (context * 576 + rows * 12 * (576 + 512))
    return size, 2 * requests * 12 * (576 + 512) * (rows * context - rows * (rows - 1) // 2)


def _write(op: Callable[..., Any], device: torch.device) -> list[Call]:
    data = Inputs(device)
    rows, cache = data.normal(ROUND, 576), data.normal(1 + REQUESTS * 4, BLOCK_ROWS, 1, 576)
    slots = torch.arange(REQUESTS, device=device)[:, None] * 512 + torch.arange(250, 250 + WIDTH, device=device) + BLOCK_ROWS
    return [lambda: op(rows, slots.flatten(), cache)]


def _attention_calls(requests: int, rows: int, context: int, layers: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data, per_request = Inputs(device), context // BLOCK_ROWS
        count = requests * per_request
        cache, q = data.normal(1 + count, BLOCK_ROWS, 1, 576), data.normal(requests * rows, 12, 576)
        scattered = torch.randperm(count, device=device, generator=torch.Generator(device).manual_seed(2)) + 1
        tables = scattered.int().view(requests, per_request)
        contexts, bounds = data.full(requests, context), data.bounds(requests, rows)

        def all_layers() -> None:
            plans: Plans = {}
            for _ in range(layers):
                op(q, cache, tables, contexts, bounds, 192**-0.5, 512, plans)

        return [all_layers]

    return prepare


# ---- KDA

STATE = 12 * 128 * 128 * 4  # bytes of one request's recurrent state
CHANNELS = 3 * 12 * 128
ROW = 2 * 5 * 12 * 128 + 2 * 12  # bytes of one row through the recurrence: q, k, v, decay, o, and beta


def kda_cases() -> Iterator[Case]:
    for rows in (1024, CHUNK):
        flops = 6 * rows * STATE // 4
        yield Case("kda_extend", f"{rows} rows", rows * ROW + 2 * STATE, flops, _scan(1, rows))
    yield Case("kda_decode", f"{REQUESTS} x 1 rows", REQUESTS * (2 * STATE + ROW), 0, _scan(REQUESTS, 1))
    yield Case("kda_verify", f"{REQUESTS} x {WIDTH} rows", REQUESTS * (STATE + WIDTH * ROW), 0, _scan_verify, 1.5, kda=1)
    conv = 2 * CHANNELS * 3  # bytes of one request's history
    size = REQUESTS * (2 * STATE + 2 * conv + WIDTH * 2 * (CHANNELS + 12 * 128 + 12))
    yield Case("kda_commit", f"{REQUESTS} x {WIDTH} rows, all accepted", size, 0, _commit(WIDTH))
    yield Case("kda_commit", f"{REQUESTS} x {WIDTH} rows, 3 accepted", size, 0, _commit(3), kda=1)
    for requests, rows in ((REQUESTS, 1), (1, CHUNK)):
        size = requests * (4 * rows * CHANNELS + 2 * conv)
        yield Case("short_conv", f"{requests} x {rows} rows", size, 0, _conv(requests, rows))
    size = REQUESTS * (4 * WIDTH * CHANNELS + conv)
    yield Case("short_conv_verify", f"{REQUESTS} x {WIDTH} rows", size, 0, _conv_verify, kda=1)
    for rows, calls in ((ROUND, 1), (CHUNK, 0)):
        yield Case("kda_output", f"{rows} rows", 3 * 2 * rows * 12 * 128, 0, _output(rows), kda=calls)


def _recurrence(data: Inputs, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """qkv, decay and beta of `rows` rows; a_log and dt_bias."""
    qkv, decay = data.normal(rows, CHANNELS), data.normal(rows, 12, 128)
    return (qkv, decay, data.normal(rows, 12)), (
        data.normal(12, dtype=torch.float32),
        data.normal(12, 128, dtype=torch.float32),
    )


def _heads(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.unflatten(-1, (3, 12, 128)).unbind(1)


def _states(data: Inputs, count: int) -> Tensor:
    return data.normal(1 + count * REQUESTS, 12, 128, 128, dtype=torch.float32)


def _scan(requests: int, rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        count = sets(REQUESTS * STATE) if requests == REQUESTS else 1
        (qkv, decay, beta), constants = _recurrence(data, requests * rows)
        state, bounds, fresh = _states(data, count), data.bounds(requests, rows), data.full(requests, 0, torch.bool)

        def call(slots: Tensor) -> Call:
            return lambda: op(*_heads(qkv), decay, beta, *constants, -5.0, state, slots, fresh, bounds)

        return [call(data.slots(n)[:requests]) for n in range(count)]

    return prepare


def _scan_verify(op: Callable[..., Any], device: torch.device) -> list[Call]:
    data, count = Inputs(device), sets(REQUESTS * STATE)
    (qkv, decay, beta), constants = _recurrence(data, ROUND)
    state, bounds = _states(data, count), data.bounds(REQUESTS, WIDTH)

    def call(slots: Tensor) -> Call:
        return lambda: op(*_heads(qkv), decay, beta, *constants, -5.0, state, slots, bounds)

    return [call(data.slots(n)) for n in range(count)]


def _commit(accepted: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data, count = Inputs(device), sets(REQUESTS * STATE)
        (qkv, decay, beta), constants = _recurrence(data, ROUND)
        state, bounds = _states(data, count), data.bounds(REQUESTS, WIDTH)
        conv, weight = data.normal(len(state), CHANNELS, 3), data.normal(CHANNELS, 4, dtype=torch.float32)
        taken = data.full(REQUESTS, accepted, torch.int64)

        def call(slots: Tensor) -> Call:
            return lambda: op(qkv, weight, conv, decay, beta, *constants, -5.0, state, slots, bounds, taken)

        return [call(data.slots(n)) for n in range(count)]

    return prepare


def _conv(requests: int, rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        x, weight = data.normal(requests * rows, CHANNELS), data.normal(CHANNELS, 4, dtype=torch.float32)
        state, bounds, fresh = (
            data.normal(1 + REQUESTS, CHANNELS, 3),
            data.bounds(requests, rows),
            data.full(requests, 0, torch.bool),
        )
        slots = data.slots(0)[:requests]
        return [lambda: op(x, weight, state, slots, fresh, bounds)]

    return prepare


def _conv_verify(op: Callable[..., Any], device: torch.device) -> list[Call]:
    data = Inputs(device)
    x, weight = data.normal(ROUND, CHANNELS), data.normal(CHANNELS, 4, dtype=torch.float32)
    state, bounds, slots = data.normal(1 + REQUESTS, CHANNELS, 3), data.bounds(REQUESTS, WIDTH), data.slots(0)
    return [lambda: op(x, weight, state, slots, bounds)]


def _output(rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        o, gate, weight = data.normal(rows, 12, 128), data.normal(rows, 12, 128), data.normal(128, dtype=torch.float32)
        return [lambda: op(o, gate, weight, 1e-5)]

    return prepare


# ---- matrix products, by the library


def linear_cases() -> Iterator[Case]:
    """A round's projections: rows, width out, width in; calls in a KDA and an MLA layer."""
    for what, rows, out, wide, kda, mla in (
        ("KDA's input", ROUND, 4 * 1536 + 128 + 12 + 4, 7168, 1, 0),
        ("KDA's decay", ROUND, 1536, 128, 1, 0),
        ("MLA's input", ROUND, 1536 + 576 + 1536, 7168, 0, 1),
        ("MLA's queries", ROUND, 12 * 192, 1536, 0, 1),
        ("attention's output", ROUND, 7168, 1536, 1, 1),
        ("latent down", SLICE, 3584, 7168, 1, 1),
        ("latent up", ROUND, 896, 3584, 1, 1),
        ("shared experts' gate and up", ROUND, 1536, 7168, 1, 1),
        ("shared experts' down", ROUND, 7168, 768, 1, 1),
    ):
        size, flops = 2 * (rows * wide + out * wide + rows * out), 2 * rows * wide * out
        yield Case(LINEAR, f"{what}, {rows} x {wide} → {out}", size, flops, _linear(rows, out, wide), kda=kda, mla=mla)


def _linear(rows: int, out: int, wide: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        x = data.normal(rows, wide)

        def call(weight: Tensor) -> Call:
            return lambda: op(x, weight)

        return [call(data.normal(out, wide, scale=wide**-0.5)) for _ in range(min(64, sets(2 * out * wide)))]

    return prepare
