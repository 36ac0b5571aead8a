"""One rank's engine through its device thread on the golden checkpoint: chunks, barriers, first tokens, decode rounds."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from k3mesh.errors import EngineLost, Internal
from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, Handoff, HandoffReady, LocalRow, Notice
from services.contracts.geometry import Geometry, blocks_for
from services.contracts.ids import NULL_SLOT
from services.contracts.placement import place as place_fields
from services.worker.cache.pools import DTYPES, Pools, allocate
from services.worker.cache.slots import SlotStates
from services.worker.decode_round import DecodeReplica
from services.worker.engine import Engine, Runner
from services.worker.hop import StageBoundary
from services.worker.model.backends import choose_ops
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import join
from services.worker.prefill_step import PrefillStage
from services.worker.speculative.sampling import Sampling, sample
from services.worker.wire import (
    BlockDelta,
    ChunkRow,
    Command,
    ForgetRooms,
    Mode,
    PlaceInstall,
    PrefillStep,
    Report,
    RoundPlan,
    RoundResult,
    StepDone,
)
from tests.lib.golden import GOLDEN, TINY, golden_model, needs_golden, request, topology_of
from tests.lib.golden import Engine as Reference

pytestmark = needs_golden
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
WARM = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=7)
PLACES, BLOCKS, SLOTS = 4, 24, 8
DEADLINE_S = 60


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Rank:
    """A whole model in one rank: prefill and decode share its caches, as if a handoff had copied them."""

    def __init__(self, interval: int = 1):
        self.model = golden_model(TINY)
        topology = topology_of(self.model)
        geometry = Geometry(self.model, topology, "float32")
        place = topology.place_of(0)
        self.pools: Pools = allocate(
            place_fields(
                geometry, place, engine_id="test", engine_epoch=1, model_fingerprint="", num_blocks=BLOCKS,
                num_slots=SLOTS, verify_width=1,
            )
        )  # fmt: skip
        dtype = DTYPES["float32"]
        groups = join(topology, 0, "")
        ops, _ = choose_ops(self.model, topology, "cpu", dtype, dtype)
        stage = DecoderStage(
            self.model, topology, place, load_stage_weights(GOLDEN / TINY, self.model, topology, place, dtype),
            self.pools.caches, groups.tp, GlooExperts(groups.ep, self.model.num_experts, 8), ops,
        )  # fmt: skip
        self.notices: list[Notice] = []
        self.steps = len(geometry.producer_steps(0))
        self.prefill = PrefillStage(
            stage, StageBoundary(groups.pipeline, self.model, place, dtype), self.notices.append,
            index=0, states=SlotStates(self.pools.caches), producer_steps=self.steps, interval=interval,
        )  # fmt: skip
        self.decode = DecodeReplica(
            stage, replica=0, places=PLACES, max_model_len=512, verify_width=1, vocab_size=self.model.vocab_size
        )

    def close(self) -> None:
        self.pools.close()


class Driver:
    """Submits to an engine and waits for its reports."""

    def __init__(self, runner: Runner):
        self.engine = Engine()
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self.engine.start(runner, self._reports.put_nowait)

    async def __call__(self, command: Command) -> Report:
        self.engine.submit(command)
        reply = asyncio.ensure_future(self._reports.get())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({reply, self.engine.failed}, return_when=asyncio.FIRST_COMPLETED)
        if self.engine.failed.done():
            reply.cancel()
            self.engine.failed.result()
        return reply.result()


@pytest.fixture
async def drive() -> AsyncIterator[type[Driver]]:
    """Driver, whose engines end with the test."""
    engines: list[Engine] = []

    class Owned(Driver):
        def __init__(self, runner: Runner):
            super().__init__(runner)
            engines.append(self.engine)

    yield Owned
    for engine in engines:
        await engine.close(DEADLINE_S)


@pytest.fixture(scope="module")
def shared_rank():
    rank = Rank()
    yield rank
    rank.close()


@pytest.fixture
def rank(shared_rank: Rank) -> Rank:
    shared_rank.notices.clear()
    return shared_rank


def packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def chunk(
    tokens: list[int], start: int, end: int, blocks: Sequence[int], *, room: int = 9, slot: int = 1, rule: Sampling = GREEDY
) -> ChunkRow:
    """Rows [start, end) of a prompt whose blocks are `blocks`; those that begin inside the chunk are new."""
    last = end == len(tokens)
    new = tuple(blocks[blocks_for(start) : blocks_for(end)])
    return ChunkRow(f"r{room}", room, start, end, last, packed(tokens[start:end]), new, slot, rule if last else None, 0)


def expected_tokens(prompt: list[int], count: int, rule: Sampling = GREEDY) -> list[int]:
    """`count` tokens after a prompt, each by recomputing everything before it."""
    return list(_recompute(tuple(prompt), count, rule))


@cache
def _recompute(prompt: tuple[int, ...], count: int, rule: Sampling) -> tuple[int, ...]:
    reference = Reference(TINY, topology_of(golden_model(TINY)), torch.float32)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        sequence = request(tokens)
        logits = reference.step([(sequence, len(tokens))], "extend")
        tokens += sample(logits[-1:], [rule], [len(tokens)])
    return tuple(tokens[len(prompt) :])


def install(place: int, prompt: list[int], first: int, blocks: Sequence[int], *, slot: int, rule: Sampling) -> PlaceInstall:
    return PlaceInstall(place, 100 + place, tuple(blocks), slot, len(prompt), (first,), rule)


def plan(number: int, live: Sequence[int], bucket: int, **changes) -> RoundPlan:
    empty = {"installs": (), "clears": (), "deltas": ()}
    return RoundPlan(number, bucket, Mode.LOW_LATENCY_EAGER, live=tuple(live), **{**empty, **changes})


@pytest.mark.parametrize("rule", [GREEDY, WARM], ids=["greedy", "sampled"])
async def test_tokens_of_chunked_prefill_and_decode_equal_a_full_recompute(rank: Rank, drive, rule: Sampling):
    prompt = prompt_of(300, 0)
    blocks = [5, 2, 7]
    step = drive(rank.prefill)
    for number, (start, end) in enumerate([(0, 128), (128, 256), (256, 300)], start=1):
        done = await step(PrefillStep(number, (chunk(prompt, start, end, blocks, rule=rule),)))
        assert isinstance(done, StepDone)
    (first,) = done.first_tokens
    assert first.window == (first.token,)

    run = drive(rank.decode)
    tokens = [first.token]
    changes = {"installs": (install(2, prompt, first.token, blocks, slot=1, rule=rule),)}
    for number in range(1, 6):
        result = await run(plan(number, [2], bucket=4, **changes))
        assert isinstance(result, RoundResult)
        assert result.tokens[0].tokens == result.tokens[0].window
        tokens += result.tokens[0].tokens
        changes = {}
    rank.prefill.execute(ForgetRooms((9,)))
    rank.decode.execute(plan(0, [], bucket=1, clears=(2,)))
    assert tokens == expected_tokens(prompt, 6, rule)


@pytest.mark.parametrize("mode", Mode)
async def test_requests_in_one_batch_get_the_tokens_that_each_gets_alone(rank: Rank, drive, mode: Mode):
    prompt_a, prompt_b = prompt_of(130, 0), prompt_of(5, 1)
    blocks_a, blocks_b = [9, 3], [12]
    step, run = drive(rank.prefill), drive(rank.decode)
    await step(PrefillStep(1, (chunk(prompt_a, 0, 128, blocks_a, room=1, slot=3),)))
    both = (chunk(prompt_a, 128, 130, blocks_a, room=1, slot=3), chunk(prompt_b, 0, 5, blocks_b, room=2, slot=2))
    done = await step(PrefillStep(2, both))
    assert isinstance(done, StepDone)
    assert [first.room for first in done.first_tokens] == [1, 2]
    tokens = {place: [first.token] for place, first in zip((0, 3), done.first_tokens, strict=True)}
    installs = (
        install(0, prompt_a, tokens[0][0], blocks_a, slot=3, rule=GREEDY),
        install(3, prompt_b, tokens[3][0], blocks_b, slot=2, rule=GREEDY),
    )
    for number in range(1, 5):
        result = await run(replace(plan(number, [0, 3], bucket=4, installs=installs), mode=mode))
        assert isinstance(result, RoundResult)
        for entry in result.tokens:
            tokens[entry.place] += entry.tokens
        installs = ()
    rank.prefill.execute(ForgetRooms((1, 2)))
    rank.decode.execute(plan(0, [], bucket=1, clears=(0, 3)))
    assert tokens == {0: expected_tokens(prompt_a, 5), 3: expected_tokens(prompt_b, 5)}


@pytest.mark.parametrize("resumed_at", [128, 256, 384])
async def test_a_prompt_that_starts_from_a_checkpoint_has_the_logits_of_a_whole_recompute(
    rank: Rank, drive, monkeypatch: pytest.MonkeyPatch, resumed_at: int
):
    """Another prompt left blocks and states behind; this one shares their first tokens. What it starts from is not changed."""
    seen: list[torch.Tensor] = []
    stage, logits = rank.prefill._stage, rank.prefill._stage.logits
    monkeypatch.setattr(stage, "logits", lambda hidden: seen.append(logits(hidden)) or seen[-1])
    first = prompt_of(500, 0)
    prompt = [*first[:resumed_at], *prompt_of(400 - resumed_at, 1)]
    blocks, checkpoint, slots = [5, 2, 7, 4], 6, iter((2, 3))
    step = drive(rank.prefill)
    for number, (start, end) in enumerate([(0, 128), (128, 256), (256, 384), (384, 500)], start=1):
        save = checkpoint if end == resumed_at else NULL_SLOT
        await step(PrefillStep(number, (replace(chunk(first, start, end, blocks, room=1), save_slot=save),)))
    shared = blocks[: resumed_at // 128]
    pools = [*rank.pools.caches.kda_rec.values(), *rank.pools.caches.kda_conv.values()]
    kept = [pool[checkpoint].clone() for pool in pools]
    rows = [pool[shared].clone() for pool in rank.pools.caches.mla.values()]
    for room, slot in zip((2, 3), slots, strict=True):  # twice: the first one leaves the checkpoint as it was
        table = [*shared, *range(8 * room - 6, 8 * room - 2)][:4]
        row = replace(
            chunk(prompt, resumed_at, 400, table, room=room, slot=slot), load_slot=checkpoint, new_blocks=tuple(table)
        )
        number += 1
        await step(PrefillStep(number, (row,)))
    number += 1
    for start, end in ((0, 256), (256, 400)):
        await step(PrefillStep(number, (chunk(prompt, start, end, [9, 15, 16, 17], room=4, slot=4),)))
        number += 1
    rank.prefill.execute(ForgetRooms((1, 2, 3, 4)))
    _, once, twice, whole = seen
    assert torch.equal(once, twice)
    assert (once - whole).abs().max() < 1e-4
    reference = Reference(TINY, topology_of(rank.model), torch.float32)
    assert (once - reference.step([(request(prompt), 400)], "extend")[-1:]).abs().max() < 1e-4
    assert all(torch.equal(pool[checkpoint], state) for pool, state in zip(pools, kept, strict=True))
    mla = rank.pools.caches.mla.values()
    assert all(torch.equal(pool[shared], before) for pool, before in zip(mla, rows, strict=True)), "shared rows were written to"


async def test_a_place_goes_on_in_a_block_that_a_delta_brings(rank: Rank, drive):
    prompt = prompt_of(127, 0)
    blocks = [6]
    done = await drive(rank.prefill)(PrefillStep(1, (chunk(prompt, 0, 127, blocks, room=4, slot=5),)))
    assert isinstance(done, StepDone)
    run, tokens = drive(rank.decode), [done.first_tokens[0].token]
    for number, changes in enumerate(
        [
            {"installs": (install(1, prompt, tokens[0], blocks, slot=5, rule=GREEDY),)},
            {"deltas": (BlockDelta(1, (11,)),)},
            {},
        ],
        start=1,
    ):
        result = await run(plan(number, [1], bucket=1, **changes))
        assert isinstance(result, RoundResult)
        tokens += result.tokens[0].tokens
    rank.prefill.execute(ForgetRooms((4,)))
    rank.decode.execute(plan(0, [], bucket=1, clears=(1,)))
    assert tokens == expected_tokens(prompt, 4)


async def test_padding_and_idle_rounds_leave_every_live_unit_alone(rank: Rank, drive):
    pools = rank.pools.caches
    before = {
        name: {n: pool[1:].clone() for n, pool in getattr(pools, name).items()} for name in ("mla", "kda_rec", "kda_conv")
    }
    result = await drive(rank.decode)(plan(1, [], bucket=4))
    assert isinstance(result, RoundResult)
    assert result.tokens == ()
    for name, layers in before.items():
        for layer, units in layers.items():
            assert torch.equal(getattr(pools, name)[layer][1:], units), f"{name} of layer {layer}"
            assert torch.isfinite(getattr(pools, name)[layer][0]).all(), "the null unit stays finite"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, [(n, n + 1) for n in range(13)]),
        (5, [(0, 5), (5, 10), (10, 13)]),
        (13, [(0, 13)]),
        (99, [(0, 13)]),
        (0, [(0, 13)]),
    ],
)
async def test_barriers_follow_the_interval_between_chunk_and_handoff(shared_rank: Rank, drive, interval: int, expected):
    rank = shared_rank
    rank.notices.clear()
    stage = PrefillStage(
        rank.prefill._stage, rank.prefill._boundary, rank.notices.append, index=0, states=SlotStates(rank.pools.caches),
        producer_steps=rank.steps, interval=interval,
    )  # fmt: skip
    step = drive(stage)
    prompt = prompt_of(3)
    done = await step(PrefillStep(1, (chunk(prompt, 0, 3, [4], room=77, slot=6),)))
    assert isinstance(done, StepDone)
    step.engine.submit(ForgetRooms((77,)))
    await step(PrefillStep(2, (chunk(prompt, 0, 3, [4], room=78, slot=6),)))
    token = done.first_tokens[0].token
    assert rank.notices[: len(expected) + 3] == [
        ChunkStarted(1, (LocalRow(77, 0, 3, True, 6, (4,)),)),
        *[FieldsReady(1, lo, hi) for lo, hi in expected],
        HandoffReady(77, Handoff(token, (token,), 0)),
        ForgetLocal((77,)),
    ]


async def test_a_barrier_comes_after_the_writes_it_announces(shared_rank: Rank, drive):
    rank = shared_rank
    seen: list[int] = []

    def post(notice: Notice) -> None:
        if isinstance(notice, FieldsReady):
            layer = notice.lo
            caches = rank.pools.caches
            if layer in caches.mla:
                assert caches.mla[layer][20, :2].any(), f"the rows of layer {layer} are not in the cache at its barrier"
                assert not caches.mla[layer][20, 2:].any()
            else:
                assert caches.kda_rec[layer][7].any(), f"the state of layer {layer} is not in the cache at its barrier"
                assert caches.kda_conv[layer][7].any()
            seen.append(layer)

    stage = PrefillStage(
        rank.prefill._stage, rank.prefill._boundary, post, index=0, states=SlotStates(rank.pools.caches),
        producer_steps=rank.steps, interval=1,
    )  # fmt: skip
    for layers, unit in ((rank.pools.caches.mla, 20), (rank.pools.caches.kda_rec, 7), (rank.pools.caches.kda_conv, 7)):
        for pool in layers.values():
            pool[unit] = 0
    await drive(stage)(PrefillStep(1, (chunk(prompt_of(2), 0, 2, [20], room=5, slot=7),)))
    assert seen == list(range(13))


async def test_forgotten_rooms_and_cleared_places_leave_no_table(rank: Rank, drive):
    prompt = prompt_of(200, 0)
    step, run = drive(rank.prefill), drive(rank.decode)
    done = await step(PrefillStep(1, (chunk(prompt, 0, 200, [1, 2], room=8),)))
    assert isinstance(done, StepDone)
    await run(plan(1, [0], 1, installs=(install(0, prompt, done.first_tokens[0].token, [1, 2], slot=1, rule=GREEDY),)))
    assert rank.prefill.counters() == {"rooms": 1, "blocks_in_tables": 2}
    assert rank.decode.counters() == {"places": 1, "windows": 1, "blocks_in_tables": 2}
    step.engine.submit(ForgetRooms((8, 12345)))
    await run(plan(2, [], 1, clears=(0,)))
    await step.engine.call(lambda: None)
    assert rank.prefill.counters() == {"rooms": 0, "blocks_in_tables": 0}
    assert rank.decode.counters() == {"places": 0, "windows": 0, "blocks_in_tables": 0}


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_a_gap_in_plan_ids_is_refused_and_nothing_runs(rank: Rank, drive, number: int):
    run = drive(rank.decode)
    await run(plan(1, [], 1))
    rounds = rank.decode.totals()["rounds"]
    with pytest.raises(Internal, match=f"plan {number} follows plan 1"):
        run.engine.submit(plan(number, [], 1))
    await run.engine.call(lambda: None)
    assert (rank.decode.totals()["rounds"], run.engine.pending) == (rounds, 0)


PROMPT = [1, 2, 3]
BAD_ROWS = {
    "a hole in the prompt": [chunk(PROMPT, 0, 1, [4]), replace(chunk(PROMPT, 2, 3, [4]), new_blocks=())],
    "a start behind nothing": [chunk(PROMPT, 1, 3, [4])],
    "fewer tokens than it says": [replace(chunk(PROMPT, 0, 3, [4]), tokens=packed([1, 2]))],
    "another slot": [chunk(PROMPT, 0, 1, [4]), replace(chunk(PROMPT, 1, 3, [4]), slot=2)],
    "a block too few": [replace(chunk(PROMPT, 0, 3, [4]), new_blocks=())],
    "the null block": [chunk(PROMPT, 0, 3, [0])],
    "the null slot": [chunk(PROMPT, 0, 3, [4], slot=0)],
    "no sampling at the end": [replace(chunk(PROMPT, 0, 3, [4]), sampling=None)],
}


@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS.keys())
async def test_a_chunk_that_cannot_be_ends_the_epoch(rank: Rank, drive, rows: list[ChunkRow]):
    step = drive(rank.prefill)
    *good, bad = rows
    for number, row in enumerate(good, start=1):
        await step(PrefillStep(number, (row,)))
    with pytest.raises(EngineLost, match="the engine must restart"):
        await step(PrefillStep(len(rows), (bad,)))
    with pytest.raises(EngineLost, match="has failed"):
        step.engine.submit(PrefillStep(len(rows) + 1, (chunk(PROMPT, 0, 3, [4], room=10),)))
    rank.prefill.execute(ForgetRooms((9,)))


PLACED = install(1, PROMPT, 5, [4], slot=1, rule=GREEDY)
BAD_PLANS = {
    "a taken place": ([plan(1, [1], 1, installs=(PLACED,))], plan(2, [1], 1, installs=(PLACED,))),
    "an empty place": ([], plan(1, [0], 1)),
    "a place that is not there": ([], plan(1, [PLACES], 1)),
    "a table too short": ([], plan(1, [1], 1, installs=(replace(PLACED, blocks=()),))),
    "a table too long": ([], plan(1, [1], 1, installs=(replace(PLACED, blocks=tuple(range(1, 10))),))),
    "a window of another width": ([], plan(1, [1], 1, installs=(replace(PLACED, window=(5, 6)),))),
    "a token outside the vocabulary": ([], plan(1, [1], 1, installs=(replace(PLACED, window=(512,)),))),
    "blocks for nobody": ([], plan(1, [], 1, deltas=(BlockDelta(0, (3,)),))),
    "the null slot": ([], plan(1, [1], 1, installs=(replace(PLACED, slot=0),))),
    "more rows than the bucket": ([plan(1, [1], 1, installs=(PLACED,))], plan(2, [1], 0)),
    "prompt chunks": ([], PrefillStep(1, (chunk(PROMPT, 0, 3, [4]),))),
}


@pytest.mark.parametrize(("good", "bad"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
async def test_a_plan_that_cannot_be_ends_the_epoch(rank: Rank, drive, good: list[RoundPlan], bad: Command):
    run = drive(rank.decode)
    try:
        for it in good:
            await run(it)
        with pytest.raises(EngineLost, match="the engine must restart"):
            await run(bad)
    finally:
        for place in (0, 1):
            rank.decode._clear(place)


async def test_results_come_in_the_order_of_plans_and_work_queued_behind_a_failure_is_not_run(rank: Rank, drive):
    run = drive(rank.decode)
    rounds = rank.decode.totals()["rounds"]
    for number in (1, 2):
        run.engine.submit(plan(number, [], 1))
    run.engine.submit(plan(3, [0], 1))  # place 0 is empty
    run.engine.submit(plan(4, [], 1))
    with pytest.raises(EngineLost):
        async with asyncio.timeout(DEADLINE_S):
            await run.engine.watch()
    await run.engine.call(lambda: None)
    assert rank.decode.totals()["rounds"] == rounds + 2
    assert [run._reports.get_nowait().round_id for _ in range(run._reports.qsize())] == [1, 2]
