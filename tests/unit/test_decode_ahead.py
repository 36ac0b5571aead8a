"""The next round is planned while one runs: what may be known of it then, and what stays until the last one has landed."""

import pytest

from services.contracts.ids import Place, Replica, Room, Token
from services.scheduler.decode import events as ev
from tests.lib.decode_world import DecodeWorld, small_shape

TOKEN = Token(9)


def resident(world: DecodeWorld, prompt: int = 100, max_tokens: int = 50, **changes: object) -> Room:
    room = world.reserve(prompt, max_tokens, **changes)  # pyright: ignore[reportArgumentType]
    world.attach(room)
    world.all_ready(room, TOKEN)
    return room


def live(plan: ev.RoundPlan | None) -> list[tuple[Place, ...]]:
    assert plan is not None
    return [part.live for part in plan.replicas]


def answer(world: DecodeWorld, room: Room, tokens: tuple[int, ...], proposals: int = 0) -> None:
    """The round that runs gives the only request these tokens."""
    plan = world.out.popleft()
    said = tuple(map(Token, tokens))
    model = world.rooms[room]
    assert model.manifest is not None
    model.truth += said
    for known in world.places[model.manifest.replica].values():
        known.position += len(said)
    world.windows[room] = 1 + proposals
    rows = (ev.PlaceTokens(Place(0), said, (said[-1], *[TOKEN] * proposals)),)
    if world.out:
        world._take(world.out[0])
    world.apply(ev.RoundDone(plan.round_id, tuple(rows if part.live else () for part in plan.replicas)))


def test_one_round_is_planned_behind_the_one_that_runs_and_no_other():
    world = DecodeWorld(small_shape())
    resident(world)
    first, second = world.launch(), world.launch()
    assert first is not None and second is not None and (first.round_id, second.round_id) == (1, 2)
    assert world.launch() is None and world.planner.counters()["rounds_out"] == 2
    world.round_done(TOKEN)
    third = world.launch()
    assert third is not None and third.round_id == 3 and world.launch() is None


def test_a_round_that_is_planned_ahead_brings_the_blocks_of_wherever_the_running_one_ends():
    width = 4
    world = DecodeWorld(small_shape(verify_width=width, adaptive=False, replicas=1))
    resident(world, prompt=128 - 2 * width - 1)  # the first round writes up to the block's last but one row
    first, second = world.launch(), world.launch()
    assert first is not None and second is not None
    assert len(first.replicas[0].installs[0].blocks) == 1 and [len(it) for it in second.deltas[Replica(0)].values()] == [1]


def test_who_gets_the_last_token_from_the_running_round_is_not_planned_behind_it():
    world = DecodeWorld(small_shape())
    resident(world, max_tokens=2)
    resident(world, max_tokens=3)
    assert live(world.launch()) == [(0,), (0,)]
    assert live(world.launch()) == [(), (0,)], "the first surely ends with its second token"
    world.round_done(TOKEN)
    assert world.launch() is None, "and so does the second, in the round that runs now"
    world.round_done(TOKEN)
    clears = world.launch()
    assert clears is not None and clears.bucket == 0
    world.round_done()
    world.settle()


def test_who_ended_unforeseen_lingers_in_one_round_and_keeps_what_it_has_until_that_has_landed():
    world = DecodeWorld(small_shape(replicas=1))
    room = resident(world, stops=(Token(5),))
    world.launch_ahead()
    answer(world, room, (5,))
    end = world.rooms[room].end
    assert isinstance(end, ev.Finished) and end.stop_token == 5, "the client does not wait for the round that runs"
    held = world.planner.counters()
    assert (held["finishing"], held["places_used"], held["slots_used"], held["blocks_used"]) == (1, 1, 1, 1)
    clears = world.launch()
    assert clears is not None and clears.replicas[0].clears == (0,)
    answer(world, room, (7,))
    assert world.rooms[room].published == [TOKEN, 5] and world.planner.counters()["places_used"] == 0
    world.round_done()
    world.settle()


def test_a_cancelled_request_stays_until_both_rounds_have_landed():
    world = DecodeWorld(small_shape(replicas=1))
    room = resident(world)
    world.launch_ahead()
    world.cancel_request(room)
    for left in (1, 1, 0):
        assert world.planner.counters()["finishing"] == left
        if world.out:
            world.round_done()
    world.settle()


@pytest.mark.parametrize("proposals", [0, 1, 3])
def test_a_round_is_no_wider_than_the_windows_that_the_running_one_leaves(proposals: int, monkeypatch: pytest.MonkeyPatch):
    world = DecodeWorld(small_shape(verify_width=4, replicas=1))
    room = resident(world)
    widths = world.planner._rooms.widths._replicas[0]
    widths.target = 1 + proposals
    monkeypatch.setattr(type(world.planner._rooms.widths), "_choose", lambda *_: None)  # the target is ours
    first = world.launch()
    assert first is not None and first.replicas[0].width.proposals == proposals
    widths.target = 4
    second = world.launch()
    assert second is not None and second.replicas[0].width.width == 1 + proposals
    answer(world, room, (1,), proposals)
    world.settle()


def test_without_blocks_for_the_round_behind_it_a_round_is_waited_for_and_nobody_is_aborted():
    world = DecodeWorld(small_shape(replicas=1, num_blocks=2, verify_width=4, adaptive=False))
    room = resident(world, prompt=100, max_tokens=22)  # as much as the replica can hold
    out: list[int] = []
    while world.rooms[room].end is None:
        world.launch_ahead()
        out.append(len(world.out))
        answer(world, room, (9,), proposals=3)
    assert out[0] == 2 and out[-3:] == [1, 1, 1]
    end = world.rooms[room].end
    assert isinstance(end, ev.Finished) and end.completion_tokens == 22 and world.planner.totals["capacity_aborts"] == 0
    while world.out:
        answer(world, room, (9,), proposals=3)
    world.settle()


def test_clears_wait_while_somebody_is_there_whose_end_is_sure():
    """A round in which nothing runs would hold up nobody, but the workers need not hear of it twice."""
    world = DecodeWorld(small_shape(replicas=1))
    first, second = resident(world, max_tokens=2), resident(world, max_tokens=3)
    world.launch_ahead()
    world.round_done(TOKEN)
    assert world.rooms[first].end is not None and world.rooms[second].end is None
    assert world.launch() is None
    world.round_done(TOKEN)
    clears = world.launch()
    assert clears is not None and clears.replicas[0].clears == (0, 1)
    world.round_done()
    world.settle()


def test_a_round_in_which_nothing_changes_on_a_replica_has_the_part_of_the_one_before():
    world = DecodeWorld(small_shape(replicas=2))
    resident(world, prompt=1)
    world.launch()
    world.round_done(TOKEN)
    quiet = world.launch()
    world.round_done(TOKEN)
    resident(world, prompt=1)  # on the other replica
    busier = world.launch()
    assert quiet is not None and busier is not None
    changed = [part is not before for part, before in zip(busier.replicas, quiet.replicas, strict=True)]
    assert sorted(changed) == [False, True] and live(busier) != live(quiet)


def test_who_is_in_line_gets_each_block_in_the_round_that_may_need_it():
    """Nobody looks at it in the rounds between."""
    world = DecodeWorld(small_shape(replicas=1, verify_width=1, num_blocks=20))
    resident(world, prompt=1, max_tokens=1000)
    grown: list[int] = []
    while len(grown) < 3:
        plan = world.launch()
        assert plan is not None
        if plan.deltas:
            grown.append(plan.round_id)
        world.round_done(TOKEN)
    assert grown == [126, 254, 382]  # two rounds may be planned before one lands
