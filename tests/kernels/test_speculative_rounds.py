"""Windows, verify rounds and commits of one rank: speculation changes how many tokens a round gives, and no token."""

from itertools import chain, repeat
from random import Random

import pytest
import torch

from k3mesh.errors import Internal
from services.contracts.barriers import FieldsReady, HandoffReady
from services.contracts.geometry import verify_widths
from services.worker.speculative.backlog import ROUNDS as BACKLOG_ROUNDS
from services.worker.speculative.sampling import Sampling
from tests.lib.drafted import Checkpoints, ForcedDrafter, Job, SpeculativeRank

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
WARM = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=11)
EXACT = 1e-5
MARK = 1234.5  # no cache row has it
NEVER = 9  # more tokens than a window has: all proposals are true


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = {"short": prompt_of(3), "at a block's end": prompt_of(128, 1), "two blocks": prompt_of(200, 2)}


@pytest.fixture(params=["dspark", "nextn"])
def rank(request: pytest.FixtureRequest) -> SpeculativeRank:
    return request.getfixturevalue(request.param)


def force(rank: SpeculativeRank, job: Job, truth: list[int], hits: list[int]) -> ForcedDrafter:
    assert rank.forced is not None
    rank.forced.truth[job.slot] = [*job.prompt, *truth]
    rank.forced.hits[job.slot] = list(hits)
    return rank.forced


def near(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm()) < EXACT


@pytest.mark.parametrize("rule", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_tokens_are_those_of_decoding_without_a_drafter(
    plain: SpeculativeRank, rank: SpeculativeRank, prompt: list[int], rule: Sampling
):
    job = Job(prompt, rule=rule)
    wanted, _ = plain.generate(job, 30)
    tokens, _ = rank.generate(job, 30, chunks=[128] if len(prompt) > 128 else [])
    assert tokens[:30] == wanted[:30]


@pytest.mark.parametrize("rule", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_as_many_tokens_are_taken_as_are_right_and_none_is_changed(
    plain: SpeculativeRank, rank: SpeculativeRank, rule: Sampling
):
    job, limit = Job(prompt_of(120, 3), rule=rule), rank.width - 1
    wanted, _ = plain.generate(job, 60)
    hits = [0, 1, limit, NEVER, 2, limit - 1, 0, 0, NEVER]
    force(rank, job, wanted, hits)
    tokens, lengths = rank.generate(job, 2 + sum(min(n, limit) + 1 for n in hits))
    assert lengths[: len(hits)] == [min(n, limit) + 1 for n in hits]
    count = min(len(tokens), len(wanted))
    assert tokens[:count] == wanted[:count]


@pytest.mark.parametrize("rule", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_depends_on_the_widths_of_rounds(plain: SpeculativeRank, rank: SpeculativeRank, rule: Sampling, seed: int):
    """Right proposals among wrong ones, and widths that change with every round."""
    job, random = Job(prompt_of(110, 20 + seed), rule=rule), Random(seed)
    wanted, _ = plain.generate(job, 70)
    drafter = force(rank, job, wanted, [random.choice([0, 1, 2, 3, NEVER]) for _ in range(100)])
    widths = iter(lambda: random.choice(verify_widths(rank.width)), None)
    tokens, lengths = rank.generate(job, 60, widths=widths)
    drafter.hits.clear()
    assert tokens[:60] == wanted[:60]
    assert len(set(lengths)) > 2, "every round gave as much: a weak test"


@pytest.mark.parametrize("off", [6, 2 * BACKLOG_ROUNDS + 5])
def test_rounds_of_width_1_leave_the_states_of_decoding_one_by_one(plain: SpeculativeRank, rank: SpeculativeRank, off: int):
    """Speculation goes off and comes back: the drafter's rows are those of having drafted all the time."""
    job = Job(prompt_of(110, 13), slot=3)
    count = off + 14
    wanted, _ = plain.generate(job, count + 20)
    force(rank, job, wanted, [NEVER] * 2)
    tokens, lengths = rank.generate(job, count, widths=chain([rank.width, 2], repeat(1, off), repeat(rank.width)))
    assert tokens[:count] == wanted[:count] and lengths[2 : 2 + off] == [1] * off
    kept = len(job.prompt) + len(tokens) - 1
    again = Job([*job.prompt, *tokens[:-1]], slot=4, blocks=(11, 12, 13, 14, 15))
    rows = [torch.cat([pool[b, :, 0] for b in job.blocks])[: kept - 1].clone() for pool in rank.caches.draft.values()]
    states = [pool[job.slot].clone() for pool in rank.caches.kda_rec.values()]
    rank.start(again)
    for pool, row in zip(rank.caches.draft.values(), rows, strict=True):
        assert near(row, torch.cat([pool[b, :, 0] for b in again.blocks])[: kept - 1])
    for pool, state in zip(rank.caches.kda_rec.values(), states, strict=True):
        assert near(state, pool[again.slot])


def test_rows_of_a_full_block_are_written_at_once_others_when_somebody_drafts(rank: SpeculativeRank):
    """Somebody else may find a full block in the prefix cache."""
    job, pools = Job(prompt_of(124, 15), slot=5), rank.caches.draft.values()
    (first, *_), at = job.blocks, len(job.prompt)
    installs = [rank.install(job, rank.start(job, proposals=0))]
    for pool in pools:
        pool[first, at:] = MARK
    kept: list[int] = []
    for written in (False, False, False, True):
        rank.round([job], installs, width=1, following=1)
        kept.append(rank.decode.counters()["draft_rows_kept"])
        installs = []
        assert all(bool((pool[first, at:] != MARK).all()) == written for pool in pools)
    rank.round([job], width=1, following=1)
    assert [*kept, rank.decode.counters()["draft_rows_kept"]] == [1, 2, 3, 0, 1]
    rank.round([job], width=1, following=2)
    assert rank.decode.counters()["draft_rows_kept"] == 0
    rank.round([], clears=[job.place])


def test_rows_of_a_request_that_is_over_are_never_written(rank: SpeculativeRank):
    """Its blocks may be somebody else's when the others' rows are written."""
    over, other = Job(prompt_of(20, 16), slot=5), Job(prompt_of(30, 17), place=1, slot=6, blocks=(21, 22, 23))
    jobs, pools = [over, other], rank.caches.draft.values()
    installs = [rank.install(job, rank.start(job, proposals=0)) for job in jobs]
    for _ in range(3):
        rank.round(jobs, installs, width=1, following=1)
        installs = []
    for pool in pools:
        pool[list(over.blocks)] = MARK
        pool[list(other.blocks), 30:] = MARK
    rank.round([other], clears=[over.place], width=1, following=1)
    assert rank.decode.counters()["draft_rows_kept"] == 4
    rank.round([other], width=1, following=2)
    for pool in pools:
        assert bool((pool[list(over.blocks)] == MARK).all()), "a row of a finished request was written"
        assert bool((pool[other.blocks[0], 30:34] != MARK).all())
    rank.round([other], width=1, following=1)
    rank.round([], clears=[other.place])
    assert rank.decode.counters()["draft_rows_kept"] == 0


@pytest.mark.parametrize("proposals", [0, 1, 2])
def test_prefill_drafts_as_many_proposals_as_it_is_asked_for(plain: SpeculativeRank, rank: SpeculativeRank, proposals: int):
    job = Job(prompt_of(140, 14))
    whole, part = (rank.start(job, [128], proposals=count) for count in (rank.width - 1, proposals))
    padding = (0,) * (rank.width - 1 - proposals)
    assert (part.token, part.window[0], part.window[1 + proposals :]) == (whole.token, whole.token, padding)
    assert len(part.window) == rank.width and (proposals == 0 or part.window[1] != 0)
    wanted, _ = plain.generate(job, 6)
    tokens = [part.token, *rank.round([job], [rank.install(job, part)]).tokens[0].tokens]
    tokens += rank.round([job]).tokens[0].tokens
    rank.round([], clears=[job.place])
    assert tokens[:3] == wanted[:3]


def test_a_round_wider_than_its_windows_is_refused(dspark: SpeculativeRank):
    job = Job(prompt_of(9), slot=6)
    installs = [dspark.install(job, dspark.start(job))]
    dspark.round([job], installs, width=2, following=2)
    with pytest.raises(Internal, match=r"width 4, then 7 proposals, at most 7; .*too short at places \[0\]"):
        dspark.round([job], width=4)
    for width, following in ((3, 8), (2, 6), (2, 9)):
        with pytest.raises(Internal, match="replica 0 has widths"):
            dspark.round([job], width=width, following=following)
    dspark.round([], clears=[job.place])


@pytest.mark.parametrize("hits", range(8))
def test_states_after_a_round_are_those_of_decoding_one_by_one(plain: SpeculativeRank, dspark: SpeculativeRank, hits: int):
    job = Job(prompt_of(126, 4), slot=2, place=1)  # rows cross a block's end
    wanted, _ = plain.generate(job, 40)
    for rank, rounds in ((dspark, [hits, 3]), (plain, [0] * (hits + 1 + 4))):
        if rank.forced is not None:
            force(rank, job, wanted, rounds)
        first = rank.start(job)
        installs = [rank.install(job, first)]
        for _ in rounds:
            rank.round([job], installs)
            installs = []
        rank.round([], clears=[job.place])
    ours, theirs, end = dspark.caches, plain.caches, len(job.prompt) + hits + 1 + 4
    for kind in ("kda_rec", "kda_conv"):
        for layer, pool in getattr(ours, kind).items():
            assert near(pool[job.slot], getattr(theirs, kind)[layer][job.slot]), f"{kind} of layer {layer}"
    for layer, pool in ours.mla.items():
        rows, reference = (torch.cat([p[b, :, 0] for b in job.blocks])[:end] for p in (pool, theirs.mla[layer]))
        assert near(rows, reference), f"MLA rows of layer {layer}"


def test_draft_rows_after_rounds_are_those_of_a_prefill_over_the_same_tokens(plain: SpeculativeRank, rank: SpeculativeRank):
    job = Job(prompt_of(60, 5), slot=3)
    wanted, _ = plain.generate(job, 40)
    force(rank, job, wanted, [0, 2, 1, NEVER, 0])
    tokens, _ = rank.generate(job, 14)
    kept = len(job.prompt) + len(tokens) - 1
    rows = [torch.cat([pool[b, :, 0] for b in job.blocks])[:kept].clone() for pool in rank.caches.draft.values()]
    again = Job([*job.prompt, *tokens[:-1]], slot=4, blocks=(11, 12, 13))
    rank.start(again)
    for pool, row in zip(rank.caches.draft.values(), rows, strict=True):
        reference = torch.cat([pool[b, :, 0] for b in again.blocks])[:kept]
        last = kept - (1 if len(rank.caches.draft) == 1 else 0)  # NextN's newest row waits for the token behind it
        assert near(row[:last], reference[:last])


def test_draft_rows_do_not_depend_on_chunks(rank: SpeculativeRank):
    prompt = prompt_of(300, 12)
    whole, parts = Job(prompt, slot=1, blocks=(1, 2, 3)), Job(prompt, slot=2, blocks=(6, 5, 4))
    assert rank.start(whole).window == rank.start(parts, chunks=[128, 256]).window
    for pool in rank.caches.draft.values():
        one, other = (torch.cat([pool[b, :, 0] for b in job.blocks])[:300] for job in (whole, parts))
        assert near(other, one)


def test_requests_of_one_batch_accept_different_lengths(plain: SpeculativeRank, rank: SpeculativeRank):
    jobs = [
        Job(prompt_of(40, 6), place=0, slot=1, blocks=(1, 2, 3)),
        Job(prompt_of(129, 7), place=1, slot=2, blocks=(9, 8, 7), rule=WARM),
        Job(prompt_of(5, 8), place=3, slot=5, blocks=(12, 10, 11)),
    ]
    wanted = {job.place: plain.generate(job, 40)[0] for job in jobs}
    for job, hits in zip(jobs, ([2, 0, 1, 2], [0, NEVER, 2, 1], [1, 1, NEVER, 0]), strict=True):
        force(rank, job, wanted[job.place], hits)
    firsts = [rank.start(job) for job in jobs]
    tokens = {job.place: [first.token] for job, first in zip(jobs, firsts, strict=True)}
    installs = [rank.install(job, first) for job, first in zip(jobs, firsts, strict=True)]
    for _ in range(5):
        for entry in rank.round(jobs, installs).tokens:
            tokens[entry.place] += entry.tokens
        installs = []
    rank.round([], clears=[job.place for job in jobs])
    for place, sequence in tokens.items():
        count = min(len(sequence), len(wanted[place]))
        assert sequence[:count] == wanted[place][:count]


def test_a_slot_is_clean_for_the_request_after_a_rejection(plain: SpeculativeRank, rank: SpeculativeRank):
    job = Job(prompt_of(20, 9))
    wanted, _ = plain.generate(job, 20)
    for hits in ([0, 0, 0], [NEVER], [1, 0]):
        force(rank, job, wanted, hits)
        tokens, _ = rank.generate(job, 12)
        assert tokens[:12] == wanted[:12]


def test_what_stands_in_a_window_changes_no_token(plain: SpeculativeRank, dspark: SpeculativeRank):
    job = Job(prompt_of(33, 10))
    wanted, _ = plain.generate(job, 12)
    first = dspark.start(job)
    tokens = [first.token]
    generator = torch.Generator().manual_seed(5)
    window = (first.token, *torch.randint(0, 512, (7,), generator=generator).tolist())
    installs = [dspark.install(job, first.__class__(first.room, first.token, window))]
    while len(tokens) < 12:
        tokens += dspark.round([job], installs).tokens[0].tokens
        installs = []
    dspark.round([], clears=[job.place])
    assert tokens[:12] == wanted[:12]


@pytest.mark.parametrize("window", [(), (1,), (1,) * 7, (1,) * 9, (1, 2, 3, 4, 5, 6, 7, 512)], ids=len)
def test_a_wrong_window_is_refused(checkpoints: Checkpoints, dspark: SpeculativeRank, window: tuple[int, ...]):
    job = Job(prompt_of(5))
    first = dspark.start(job)
    with pytest.raises(Internal) as refused:
        dspark.round([job], [dspark.install(job, first.__class__(first.room, first.token, window))])
    assert refused.value.detail == "PD_CAND"


def test_the_draft_barrier_is_the_last_before_the_handoff(rank: SpeculativeRank):
    rank.notices.clear()
    first = rank.start(Job(prompt_of(200, 2)), chunks=[128])
    assert len(first.window) == rank.width and first.window[0] == first.token
    layers = rank.model.num_hidden_layers
    for step in (1, 2):  # the drafter writes for every chunk
        barriers = [n for n in rank.notices if isinstance(n, FieldsReady)][(step - 1) * (layers + 1) : step * (layers + 1)]
        assert [(b.lo, b.hi) for b in barriers] == [(n, n + 1) for n in range(layers + 1)]
    (index,) = [n for n, notice in enumerate(rank.notices) if isinstance(notice, HandoffReady)]
    before, handoff = rank.notices[index - 1], rank.notices[index]
    assert isinstance(before, FieldsReady) and before.hi == layers + 1
    assert isinstance(handoff, HandoffReady) and handoff.handoff.window == first.window


def test_the_draft_barrier_waits_for_the_drafter(rank: SpeculativeRank, monkeypatch: pytest.MonkeyPatch):
    """Its fields are announced when its call is over, for chunks inside a prompt and for the last one, and not before."""
    assert rank.forced is not None
    rank.notices.clear()
    draft, announced = rank.forced.draft, []

    def slow_draft(*arguments):
        proposals = draft(*arguments)
        announced.append((rank.notices[-1], any(isinstance(notice, HandoffReady) for notice in rank.notices)))
        return proposals

    monkeypatch.setattr(rank.forced, "draft", slow_draft)
    rank.start(Job(prompt_of(300, 2)), chunks=[128, 256])
    layers = rank.model.num_hidden_layers
    assert [(last.lo, last.hi, handed_over) for last, handed_over in announced] == [(layers - 1, layers, False)] * 3
    barrier, handoff, _ = rank.notices[-3:]  # the last notice forgets the room
    assert isinstance(handoff, HandoffReady) and isinstance(barrier, FieldsReady) and barrier.hi == layers + 1


def test_idle_rounds_touch_no_live_unit(rank: SpeculativeRank):
    pools = {name: getattr(rank.caches, name) for name in ("mla", "kda_rec", "kda_conv", "draft")}
    before = {name: {n: pool[1:].clone() for n, pool in layers.items()} for name, layers in pools.items()}
    assert rank.round([]).tokens == ()
    for name, layers in before.items():
        for layer, units in layers.items():
            assert torch.equal(pools[name][layer][1:], units), f"{name} of layer {layer}"
            assert torch.isfinite(pools[name][layer][0]).all(), "the null unit stays finite"
