"""A request that leaves its place for an image and comes back elsewhere goes on as if nothing had happened."""

from dataclasses import replace
from itertools import chain, count, repeat
from random import Random

import pytest
import torch

from k3mesh.errors import Internal
from services.contracts.geometry import blocks_for, verify_widths
from services.worker.cache.image import ImagePool
from services.worker.model.batch import LayerCaches
from services.worker.parallel.groups import join
from services.worker.speculative.sampling import Sampling
from services.worker.wire import FirstToken, PlaceRestore, PlaceRetract, RoundResult
from tests.lib.drafted import Checkpoints, Job, SpeculativeRank
from tests.lib.golden import topology_of

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
WARM = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=11)
GARBAGE = -77.0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=["plain", "dspark", "nextn"])
def rank(request: pytest.FixtureRequest) -> SpeculativeRank:
    return request.getfixturevalue(request.param)


class Travels:
    """One request in rounds of changing widths, which is suspended before some of them and comes back to other memory."""

    HOMES = ((0, 1, (3, 1, 2, 5, 4)), (2, 6, (21, 9, 30, 11, 22)), (1, 3, (8, 23, 7, 39, 10)))  # place, slot, blocks

    def __init__(self, rank: SpeculativeRank, prompt: list[int], rule: Sampling, seed: int):
        self.rank, self.random = rank, Random(seed)
        self.homes, self.images = chain.from_iterable(repeat(self.HOMES)), count()
        self.home(prompt, rule)
        self.state_blocks = rank.images.state_blocks
        first = rank.start(self.job)
        self.installs = [rank.install(self.job, first)]
        self.tokens, self.window, self.position = [first.token], first.window, len(prompt)
        self.following = rank.width

    def home(self, prompt: list[int], rule: Sampling) -> None:
        place, slot, blocks = next(self.homes)
        self.job = Job(prompt, place, slot, blocks, rule)

    def round(self) -> tuple[list[int], tuple[int, ...]]:
        width, self.following = self.following, self.random.choice(verify_widths(self.rank.width))
        result = self.rank.round([self.job], self.installs, width=width, following=self.following)
        self.installs = []
        (entry,) = result.tokens
        self.tokens += entry.tokens
        self.window, self.position = entry.window, self.position + len(entry.tokens)
        return list(entry.tokens), entry.window

    def travel(self) -> RoundResult:
        """Away with nobody else there, and back; what was left behind is somebody else's by then."""
        before, data = self.job, blocks_for(self.position)
        start = next(self.images) % 4 * (data + self.state_blocks)
        image = tuple(reversed(range(start, start + data + self.state_blocks)))
        self.rank.round([], retracts=[PlaceRetract(before.place, before.room, self.position, image)], width=1, following=1)
        for pool in self.pools(paged=True):
            pool[list(before.blocks)] = GARBAGE
        for pool in self.pools(paged=False):
            pool[before.slot] = GARBAGE
        self.home(before.prompt, before.rule)
        install = replace(self.rank.install(self.job, self.first()), position=self.position, window=tuple(self.window))
        return self.rank.round([], restores=[PlaceRestore(install, 0, image)], width=1, following=1)

    def first(self) -> FirstToken:
        return FirstToken(self.job.room, self.window[0], tuple(self.window))

    def pools(self, paged: bool) -> list[torch.Tensor]:
        c = self.rank.caches
        return [*c.mla.values(), *c.draft.values()] if paged else [*c.kda_rec.values(), *c.kda_conv.values()]


@pytest.mark.parametrize("rule", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [5, 120])
def test_no_token_and_no_window_depends_on_retractions(rank: SpeculativeRank, rule: Sampling, length: int):
    """Rounds of all widths; with a backlog of drafter rows, at block edges, and twice in a row."""
    stays = Travels(rank, prompt_of(length, 3), rule, seed=5)
    told = [stays.round() for _ in range(40)]
    rank.round([], clears=[stays.job.place])
    goes = Travels(rank, prompt_of(length, 3), rule, seed=5)
    when, again = Random(9), []
    for _ in range(40):
        again.append(goes.round())
        if when.random() < 0.4:
            goes.travel()
    rank.round([], clears=[goes.job.place])
    assert again == told
    assert rank.decode.counters()["places"] == rank.decode.counters()["blocks_in_tables"] == 0


def test_others_go_on_in_the_round_that_copies_and_get_the_blocks_at_once(plain: SpeculativeRank):
    """A copy out reads its blocks before the round writes to them, for a request that comes back to them or grows there."""
    goes = Travels(plain, prompt_of(120, 4), GREEDY, seed=1)
    wanted, _ = plain.generate(Job(prompt_of(126, 6), place=3, slot=5, blocks=(31, 32)), 12)
    first = plain.start(Job(prompt_of(126, 6), place=3, slot=5, blocks=(31,)))
    grows = Job(prompt_of(126, 6), place=3, slot=5, blocks=(31, goes.job.blocks[0]))
    goes.round()
    image = tuple(range(blocks_for(goes.position) + goes.state_blocks))
    retract = PlaceRetract(goes.job.place, goes.job.room, goes.position, image)
    result = plain.round([grows], [plain.install(grows, first)], retracts=[retract])
    assert result.copied == (goes.job.room,)
    tokens = [first.token, *result.tokens[0].tokens]
    while len(tokens) < 12:
        tokens += plain.round([grows]).tokens[0].tokens
    assert tokens == wanted[:12]
    plain.round([], clears=[grows.place])
    goes.home(goes.job.prompt, GREEDY)
    install = replace(plain.install(goes.job, goes.first()), position=goes.position, window=tuple(goes.window))
    assert plain.round([], restores=[PlaceRestore(install, 0, image)]).copied == (goes.job.room,)
    for _ in range(8):
        goes.round()
    plain.round([], clears=[goes.job.place])
    assert goes.tokens == plain.generate(Job(prompt_of(120, 4)), 10)[0][:10]


@pytest.mark.parametrize(
    "retract",
    [
        PlaceRetract(1, 7, 5, (0, 1, 2, 3)),
        PlaceRetract(0, 7, 6, (0, 1, 2, 3)),
        PlaceRetract(0, 7, 5, (0,)),
        PlaceRetract(0, 7, 5, (0, 0, 0, 0)),
        PlaceRetract(0, 7, 5, (0, 1, 2, 100)),
    ],
    ids=["an empty place", "another position", "too few blocks", "a block twice", "a block that is not there"],
)
def test_a_plan_that_cannot_be_is_refused(checkpoints: Checkpoints, retract: PlaceRetract):
    rank = SpeculativeRank(checkpoints.target, None)
    job = Job(prompt_of(5))
    install = rank.install(job, rank.start(job))
    whole = rank.decode._images.state_blocks + 1  # pyright: ignore
    if len(retract.image) > 1:
        retract = replace(retract, image=(*range(10, 10 + whole - 2), *retract.image[-2:]))
    with pytest.raises(Internal, match=r"cannot leave place|takes \d+ different blocks"):
        rank.round([], [install], retracts=[retract])


def test_an_image_has_every_byte_of_every_field_and_leaves_what_was_found(plain: SpeculativeRank):
    random = torch.Generator().manual_seed(1)

    def pool(units: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(units, *shape, generator=random).to(dtype)

    caches = LayerCaches(
        mla={3: pool(9, 128, 1, 6, dtype=torch.bfloat16), 1: pool(9, 128, 1, 6, dtype=torch.bfloat16)},
        kda_rec={0: pool(4, 2, 8, 8), 2: pool(4, 2, 8, 8)},
        kda_conv={0: pool(4, 48, 3, dtype=torch.bfloat16), 2: pool(4, 48, 3, dtype=torch.bfloat16)},
        draft={5: pool(9, 128, 1, 4, dtype=torch.bfloat16)},
    )
    images = ImagePool(caches, 8, join(topology_of(plain.model), 0, "").tp)
    assert images.block_bytes == 128 * (6 + 6 + 4) * 2 and images.state_blocks == 1
    paged, slots = [*caches.mla.values(), *caches.draft.values()], [*caches.kda_rec.values(), *caches.kda_conv.values()]
    wanted = [it[[4, 7, 2]].clone() for it in paged], [it[3].clone() for it in slots]
    images.save(torch.tensor([4, 7, 2]), 3, [6, 0, 5, 2])
    kept = [it[1].clone() for it in paged]
    for it in (*paged, *slots):
        it[2:] = GARBAGE
    images.load([6, 0, 5, 2], torch.tensor([1, 8, 3]), 1, found=1)
    for it, rows, first in zip(paged, wanted[0], kept, strict=True):
        assert torch.equal(it[[8, 3]], rows[1:]) and torch.equal(it[1], first)
    for it, state in zip(slots, wanted[1], strict=True):
        assert torch.equal(it[1], state)
