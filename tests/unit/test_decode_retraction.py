"""Making way and coming back, one rule at a time (spec scheduling §3.5, §3.6). The world around it asserts the rest."""

import re
from random import Random
from typing import Any

import pytest

from services.contracts.geometry import blocks_for
from services.contracts.ids import BlockKey, Replica, Room, Token
from services.contracts.lifecycle import State
from services.scheduler.decode import events as ev
from services.scheduler.decode.images import ImagePool
from tests.lib.decode_world import DecodeWorld, small_shape

TOKEN = Token(9)
LONG = 1100  # more than admission keeps free for anybody
ROOMY = {
    "replicas": 1, "num_blocks": 19, "buckets": (1, 2, 4), "max_model_len": 2000, "image_blocks": 40, "state_blocks": 3,
    "verify_width": 16, "adaptive": False,
}  # fmt: skip


class Whole(Random):
    """Every proposal is right."""

    def randint(self, a: int, b: int) -> int:
        return b


class Away(DecodeWorld):
    """Residents of one replica, 16 tokens a round each."""

    def __init__(self, **changes: Any):
        self.said: list[ev.WriteTransition] = []
        super().__init__(small_shape(**{**ROOMY, **changes}))
        self.random = Whole(0)

    def perform(self, effects: list[ev.Effect]) -> None:
        self.said += [effect for effect in effects if isinstance(effect, ev.WriteTransition)]
        super().perform(effects)

    def resident(self, prompt: int = 100, max_tokens: int = LONG, **changes: Any) -> Room:
        room = self.reserve(prompt, max_tokens, **changes)
        assert self.rooms[room].manifest is not None, "no room for a newcomer"
        self.attach(room)
        self.all_ready(room, TOKEN)
        return room

    def land(self) -> None:
        while self.out:
            self.round_done(TOKEN)

    def round(self) -> None:
        """One round from start to end, nothing ahead of it."""
        self.land()
        assert self.launch() is not None
        self.land()

    def until(self, state: State, *rooms: Room, within: int = 400) -> Room:
        """Rounds until one of these rooms is in this state."""
        for _ in range(within):
            for room in rooms:
                if self.rooms[room].state is state:
                    return room
            self.round()
        raise AssertionError(f"none of {rooms} came to be {state}")

    def state(self, room: Room) -> State | None:
        return self.rooms[room].state

    @property
    def held(self) -> dict[str, int]:
        counters = self.planner.counters()
        return {name: counters[name] for name in ("retracted", "image_blocks_used", "places_used", "slots_used")}


@pytest.fixture
def world() -> Away:
    return Away()


def test_a_resident_makes_way_and_comes_back_and_both_answers_are_whole(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTING, first, second)
    other = second if gone is first else first
    data = blocks_for(next(it.position for it in world.places[0].values() if it.room == gone))
    assert world.held == {"retracted": 1, "image_blocks_used": data + 3, "places_used": 2, "slots_used": 2}
    world.round()
    assert world.state(gone) is State.RETRACTED and world.held["places_used"] == 1
    world.until(State.FINISHED, other)
    assert world.state(gone) is State.RESTORING, "the blocks that the end freed are its own at once"
    world.round()
    assert world.state(gone) is State.DECODING and world.held["image_blocks_used"] == 0
    world.until(State.FINISHED, gone)
    totals = world.planner.totals
    assert (totals["retractions"], totals["restores"], totals["capacity_aborts"]) == (1, 1, 0)
    world.settle()


def test_the_journal_tells_how_often_a_request_was_away_and_for_how_long(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTING, first, second)
    world.round()
    world.now += 2.5
    world.until(State.RESTORING, gone)
    written = [(it.state, dict(it.fields)) for it in world.said if it.request_id == world.rooms[gone].asked.request_id]
    assert written[-3:] == [
        (State.RETRACTING, {"image_blocks": 12, "retractions": 1}),
        (State.RETRACTED, {}),
        (State.RESTORING, {"away_seconds": 2.5}),
    ]
    world.settle()


def test_who_releases_most_makes_way_and_of_equals_the_youngest():
    world = Away()
    small, large = world.resident(prompt=10), world.resident(prompt=500)
    assert world.until(State.RETRACTING, small, large) is large
    world = Away()
    old, young = world.resident(), world.resident()
    assert world.until(State.RETRACTING, old, young) is young


def test_of_those_who_release_as_much_the_one_with_fewest_tokens_makes_way():
    world = Away(num_blocks=28)
    late, early = world.resident(prompt=300), world.resident(prompt=250)  # the first needs blocks first
    for _ in range(8):
        world.round()
    behind = world.resident(prompt=370)  # as many blocks as the others by now, fewer tokens
    assert world.until(State.RETRACTING, late, early, behind) is behind


def test_who_came_in_with_room_for_all_of_its_answer_keeps_it():
    world = Away()
    grows, covered = world.resident(prompt=100), world.resident(prompt=900, max_tokens=500)
    with pytest.raises(AssertionError, match="came to be"):
        world.until(State.RETRACTING, covered, within=60)
    assert world.state(covered) is State.FINISHED
    world.until(State.FINISHED, grows)
    world.settle()


def test_newcomers_wait_behind_those_who_are_away_and_are_told_when_the_way_is_free(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTED, first, second)
    newcomer = world.reserve(10, 5)
    assert world.rooms[newcomer].manifest is None and world.refused
    world.until(State.RESTORING, gone)
    assert not world.refused
    world.settle()


def test_those_who_are_away_come_back_in_the_order_of_their_going():
    world = Away(image_blocks=60)
    rooms = [world.resident(prompt=prompt) for prompt in (60, 80, 100)]
    gone = world.until(State.RETRACTED, *rooms)
    left = [room for room in rooms if room is not gone]
    later = world.until(State.RETRACTED, *left)
    assert world.until(State.RESTORING, gone, later) is gone
    assert world.state(later) is State.RETRACTED
    for room in (gone, later):
        world.until(State.FINISHED, room)
    world.settle()


@pytest.mark.parametrize("launched", [False, True])
def test_who_is_cancelled_on_the_way_out_frees_its_image_at_once_and_its_blocks_with_the_copy(world: Away, launched: bool):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTING, first, second)
    if launched:
        world.launch()
    world.client_gone(gone)
    assert world.held["image_blocks_used"] == world.held["retracted"] == 0
    assert world.held["slots_used"] == (2 if launched else 1)
    world.land()
    assert world.held["slots_used"] == 1 and world.state(gone) is State.CANCELLED
    world.settle()


def test_who_is_cancelled_while_away_frees_its_image_in_the_same_step(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTED, first, second)
    world.cancel_request(gone)
    assert world.held["image_blocks_used"] == world.held["retracted"] == 0
    assert world.rooms[gone].states[-2:] == [State.FINISHING, State.CANCELLED]
    world.settle()


@pytest.mark.parametrize("launched", [False, True])
def test_who_is_cancelled_on_the_way_back_frees_its_image_at_once_and_its_place_with_the_copy(world: Away, launched: bool):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RESTORING, world.until(State.RETRACTING, first, second))
    if launched:
        world.launch()
    world.client_gone(gone)
    assert world.held["image_blocks_used"] == world.held["retracted"] == 0
    assert world.held["slots_used"] == int(launched)
    world.land()
    assert world.held["slots_used"] == 0
    world.settle()


def test_a_deadline_ends_a_request_that_is_away(world: Away):
    first, second = world.resident(timeout=50.0), world.resident(timeout=50.0)
    gone = world.until(State.RETRACTED, first, second)
    world.advance(51)
    end = world.rooms[gone].end
    assert isinstance(end, ev.Failure) and end.code == "deadline_exceeded" and world.held["image_blocks_used"] == 0
    world.settle()


def test_when_the_engine_is_lost_those_who_are_away_fail_like_everybody(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTED, first, second)
    world.apply(ev.EngineFailed(ev.Failure("engine_lost", "worker 1 died")))
    assert world.state(gone) is State.FAILED and not any(world.planner.counters().values())


def test_when_prefill_is_lost_those_who_are_away_stay(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTED, first, second)
    world.lose_prefill()
    world.until(State.FINISHED, gone)
    world.settle()


def test_a_resident_that_ends_before_the_copy_is_planned_gives_back_what_it_was_given(world: Away):
    """Its blocks are still to be read: no newcomer's transfer may write to them."""
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTING, first, second)
    served = second if gone is first else first
    world.client_gone(served)
    world.cancel_request(gone)
    world.reserve(1500, 5)  # the world asserts that none of its blocks is to be read
    world.settle()


@pytest.mark.parametrize(
    ("images", "told"),
    [(0, "give --retraction-snapshot-ratio above 0"), (8, r"takes \d+ blocks of host memory, 8 of 8 are free \(give a higher")],
)
def test_where_no_image_fits_the_newest_ends_with_524_and_the_other_goes_on(images: int, told: str):
    world = Away(image_blocks=images)
    old, young = world.resident(), world.resident()
    world.until(State.ABORTED, young)
    end = world.rooms[young].end
    assert isinstance(end, ev.Failure) and end.code == "capacity_aborted"
    assert re.search(told, end.message)
    world.until(State.FINISHED, old)
    assert world.planner.totals["retractions"] == 0 and world.planner.totals["capacity_aborts"] == 1
    world.settle()


def test_rounds_are_planned_ahead_again_when_everybody_has_blocks(world: Away):
    first, second = world.resident(), world.resident()
    gone = world.until(State.RETRACTING, first, second)
    world.launch_ahead()
    assert len(world.out) == 2, "the other one has what it needs for two rounds"
    world.land()
    world.until(State.FINISHED, gone)
    world.settle()


def test_an_image_pool_gives_each_block_once_and_no_more_images_than_places():
    pool = ImagePool(Replica(0), 20, state_blocks=2, limit=3)
    first, second = pool.take(3, [BlockKey(b"k")]), pool.take(4, [])
    assert len({*first.blocks, *second.blocks}) == 5 + 6 == pool.used
    pool.check([first, second])
    assert "takes 12 blocks of host memory, 9 of 20 are free" in pool.shortfall(10)
    pool.take(1, [])
    assert "3 requests are suspended" in pool.shortfall(1)
    pool.free(first)
    assert not pool.shortfall(1)
    with pytest.raises(ValueError, match="not held"):
        pool.free(first)
