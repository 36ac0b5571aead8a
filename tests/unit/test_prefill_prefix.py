"""What the prefill planner makes of a prefix cache, one history each. tests/lib/prefill_world.py knows what every block and
slot holds, and checks that a prompt starts from its own tokens and that nobody writes to what another one reads."""

import services.scheduler.prefill.events as ev
from services.contracts.ids import RequestId
from tests.lib.prefill_world import World, limits


def world_of(**changes) -> World:
    world = World(limits(**({"num_slots": 9, "stages": 1, "chunk_tokens": 1024} | changes)), places=9)
    world.connect()
    return world


def start(world: World) -> None:
    """D says yes, all manifests arrive, and the prompt starts if there is room."""
    while world.decide():
        while world.hear_decode():
            pass
    for pair in sorted(world.offers):
        world.offer(pair)


def served(world: World, *prompts: tuple[int, str, int]) -> list[RequestId]:
    """Prompts of so many tokens, of a family, with so many blocks like it, one after the other until nothing is left."""
    ids: list[RequestId] = []
    for tokens, family, like in prompts:
        ids.append(world.arrive(tokens, family=family, like=like))
        start(world)
        world.settle()
    return ids


def chunks(world: World, request_id: RequestId) -> list[tuple[int, int, bool]]:
    """Of a request's chunks: start, end, whether it leaves a checkpoint."""
    return [
        (row.start, row.end, row.save_slot != 0) for step in world.steps for row in step.rows if row.request_id == request_id
    ]


def test_the_last_chunk_is_split_at_the_last_full_block_which_gets_a_checkpoint():
    world = world_of()
    whole, exact, short = served(world, (600, "a", 9), (512, "b", 9), (128, "c", 9))
    assert chunks(world, whole) == [(0, 512, True), (512, 600, False)]
    assert chunks(world, exact) == [(0, 384, True), (384, 512, False)], "the last token is always computed"
    assert chunks(world, short) == [(0, 128, False)]
    world.check_at_rest()


def test_a_prompt_without_keys_is_not_split_and_leaves_nothing():
    world = world_of()
    (plain,) = served(world, (600, "", 0))
    assert chunks(world, plain) == [(0, 600, False)] and world.planner.cache() == {"cached_blocks": 0, "cached_checkpoints": 0}


def test_the_next_turn_starts_behind_the_last_and_says_so():
    world = world_of()
    _, turn = served(world, (600, "a", 9), (900, "a", 9))
    assert chunks(world, turn) == [(512, 896, True), (896, 900, False)]
    totals = world.planner.totals
    assert (totals["prefix_cache_queries"], totals["prefix_cache_hits"], totals["computed_tokens"]) == (1500, 512, 988)
    world.check_at_rest()


def test_a_first_token_that_ends_the_request_tells_what_was_cached():
    world = world_of()
    served(world, (600, "a", 9))
    again = world.arrive(600, family="a", like=9, max_tokens=1, ignore_eos=True)
    start(world)
    world.settle()
    assert world.clients[again].last == ev.PublishFinished(again, ev.Finished("length", 600, 512, None))


def test_a_common_beginning_gets_a_checkpoint_when_it_comes_for_the_second_time():
    world = world_of()
    first, second, third = served(world, (900, "a", 3), (700, "a", 3), (800, "a", 3))
    assert chunks(world, first)[0] == (0, 896, True)
    assert chunks(world, second) == [(0, 384, True), (384, 640, True), (640, 700, False)]
    assert chunks(world, third)[0] == (384, 768, True)
    world.check_at_rest()


def test_cached_tokens_take_no_part_of_the_batch():
    world = world_of(chunk_tokens=512)
    served(world, (500, "a", 9), (500, "b", 9))
    for family in "zab":  # two steps of the first fill the pipeline, its third waits with the others
        world.arrive(1024 if family == "z" else 600, family=family, like=9)
    start(world)
    world.answer_step(0)
    assert [(row.start, row.end) for row in world.steps[-1].rows] == [(896, 1024), (384, 512), (384, 512)]
    world.settle()


def test_a_prompt_whose_blocks_are_held_anyway_fits_beside_the_other():
    world = world_of(num_blocks=13, chunk_tokens=512)
    served(world, (900, "a", 9))
    first, second = world.arrive(1000, family="a", like=9), world.arrive(1000, family="a", like=9)
    start(world)  # 8 blocks each, of which 7 are the same
    assert chunks(world, first) and chunks(world, second)
    assert world.planner.counters()["blocks_used"] <= 9
    world.settle()
    world.check_at_rest()


def test_live_requests_take_slots_from_checkpoints_and_checkpoints_never_from_them():
    world = world_of(num_slots=4, chunk_tokens=512)
    served(world, (300, "a", 9), (300, "b", 9))
    assert world.planner.cache()["cached_checkpoints"] == 2
    for tokens, family in ((1536, ""), (300, "c"), (300, "d")):  # the first one's chunks keep the others waiting
        world.arrive(tokens, family=family, like=9)
    start(world)
    world.answer_step(0)
    world.answer_step(0)
    rows = [(row.start, row.end, row.save_slot) for row in world.steps[-1].rows]
    assert rows == [(0, 300, 0), (0, 128, 0)], "no slot for a checkpoint, so no split"
    world.settle()
    assert world.planner.totals["checkpoint_evictions"] == 2
    world.check_at_rest()


def test_a_state_may_be_taken_over_by_the_request_that_starts_from_it():
    world = world_of(num_slots=2)
    world.arrive(300, family="a", like=9)
    start(world)
    world.settle()
    assert world.planner.cache() == {"cached_blocks": 2, "cached_checkpoints": 0}, "its only slot was its own"


def test_a_cancelled_prompt_leaves_what_was_computed_of_it():
    world = world_of(chunk_tokens=256)
    stopped = world.arrive(900, family="a", like=9)
    start(world)
    world.post(ev.CancelRequested(stopped, "changed its mind"))
    world.settle()
    (again,) = served(world, (900, "a", 9))
    assert chunks(world, again)[0][0] == chunks(world, stopped)[-1][1] >= 256
    world.check_at_rest()
