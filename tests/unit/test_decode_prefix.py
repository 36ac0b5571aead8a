"""What a decode engine keeps and need not be sent again, one history each. tests/lib/decode_world.py knows the rows of every
block and checks that a request reads its own text and that no round writes to a block that another one reads."""

from typing import Any

from services.contracts.ids import Room, Token
from services.contracts.placement import Manifest
from services.scheduler.decode import events as ev
from tests.lib.decode_world import DecodeWorld, small_shape

TOKEN = Token(9)


class Told(DecodeWorld):
    """Keeps the last answer to a reservation."""

    told: ev.AnswerReserve

    def perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.AnswerReserve):
                self.told = effect
        super().perform(effects)


def world_of(**changes: Any) -> Told:
    return Told(small_shape(**({"num_blocks": 32} | changes)))


def manifest(world: DecodeWorld, room: Room) -> Manifest:
    wanted = world.rooms[room].manifest
    assert wanted is not None
    return wanted


def served(world: DecodeWorld, prompt: int | list[Token], new: int) -> Room:
    """A request from its reservation to its last token."""
    room = world.reserve(prompt, new)
    world.attach(room)
    world.all_ready(room, TOKEN)
    while world.launch() is not None:
        world.round_done(TOKEN)
    assert world.rooms[room].terminal
    return room


def test_full_blocks_of_prompt_and_answer_are_not_sent_with_the_next_turn():
    world = world_of()
    first = served(world, 300, 100)  # the anchor ends at 399: three blocks are full
    room = world.reserve([*world.rooms[first].tokens, TOKEN], 5)
    wanted = manifest(world, room)
    assert (wanted.prefix_tokens, len(wanted.blocks), world.told.prefix_tokens) == (384, 1, 384)
    assert world.planner.totals["prefix_cache_hits"] == 384
    world.settle()


def test_a_block_whose_last_row_is_the_newest_is_not_kept_yet():
    world = world_of()
    for prompt, new, kept in ((100, 29, 0), (100, 30, 128)):  # the last anchor stands at position 128, at 129
        room = served(world, prompt, new)
        again = world.reserve([*world.rooms[room].tokens, *[TOKEN] * 9], 5)
        assert manifest(world, again).prefix_tokens == kept
    world.settle()


def test_the_last_token_of_a_prompt_is_always_sent():
    world = world_of()
    first = served(world, 256, 5)
    again = world.reserve(world.rooms[first].prompt, 5)
    assert manifest(world, again).prefix_tokens == 128
    world.settle()


def test_another_text_after_the_same_beginning_gets_what_they_share():
    world = world_of()
    first = served(world, 500, 5)
    room = world.reserve([*world.rooms[first].prompt[:260], *[TOKEN] * 200], 5)
    assert manifest(world, room).prefix_tokens == 256
    world.settle()


def test_the_replica_that_has_the_beginning_is_taken_among_equals():
    world = world_of()
    first = served(world, 300, 5)
    assert manifest(world, first).replica == 0
    other = served(world, 300, 5)
    assert manifest(world, other).replica == 0, "both are empty"
    world.reserve(10, 5)  # on replica 0
    assert manifest(world, world.reserve(world.rooms[first].prompt, 5)).replica == 1, "places come first"
    third = world.reserve(world.rooms[first].prompt, 5)
    assert (manifest(world, third).replica, manifest(world, third).prefix_tokens) == (0, 256)
    world.settle()


def test_requests_share_blocks_while_they_live_and_admission_counts_them_once():
    world = world_of(replicas=1, num_blocks=9)
    first = served(world, 600, 2)
    one, two = (world.reserve([*world.rooms[first].prompt, *[Token(n)] * 30], 5) for n in (1, 2))
    assert not set(manifest(world, one).blocks) & set(manifest(world, two).blocks)
    assert world.planner.counters()["blocks_used"] == 4 + 1 + 1
    world.settle()


def test_a_room_that_never_got_its_rows_leaves_nothing_behind():
    world = world_of()
    room = world.reserve(300, 5)
    world.cancel_room(room)
    world.all_drained(room)
    assert world.planner.cache() == {"cached_blocks": 0}
    world.settle()


def test_what_was_kept_makes_way_for_those_who_decode():
    world = world_of(replicas=1, num_blocks=8)
    served(world, 500, 5)
    assert world.planner.cache() == {"cached_blocks": 3}
    served(world, 700, 100)
    assert world.planner.totals["prefix_cache_evictions"] >= 2 and not world.planner.totals["capacity_aborts"]
    world.settle()


def test_without_keys_nothing_is_kept():
    world = world_of(keys=None)
    first = served(world, 300, 100)
    assert manifest(world, world.reserve(world.rooms[first].tokens, 5)).prefix_tokens == 0
    assert world.planner.cache() == {"cached_blocks": 0}
    world.settle()
