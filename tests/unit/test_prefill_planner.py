"""Promises of the prefill planner, one history each. tests/lib/prefill_world.py plays the peers and checks every effect."""

import json

import pytest

import services.scheduler.prefill.events as ev
from services.contracts.ids import GlobalRank, Replica, RequestId, Room
from services.contracts.lifecycle import State
from services.scheduler.prefill.request import Phase
from tests.lib.prefill_world import END, OTHER, World, limits


def world_of(*, places: int = 3, **changes) -> World:
    world = World(limits(**changes), places)
    world.connect()
    return world


def phase(world: World, request_id: RequestId) -> Phase | None:
    request = world.planner.roster.requests.get(request_id)
    return request.phase if request else None


def room(world: World, request_id: RequestId) -> Room:
    return world.planner.roster.requests[request_id].room


def reserve(world: World) -> None:
    assert world.decide()
    while world.hear_decode():
        pass


def start(world: World) -> None:
    """The oldest question is answered with yes, all manifests arrive: the prompt starts if there is room."""
    reserve(world)
    for pair in sorted(world.offers):
        world.offer(pair)


def run_steps(world: World) -> None:
    while any([world.answer_step(stage) for stage in range(world.limits.stages)]):
        pass


def failure(world: World, request_id: RequestId) -> ev.Failure:
    last = world.clients[request_id].last
    assert isinstance(last, ev.PublishFailure), last
    return last.failure


# ---- admission
def test_a_decode_place_and_every_rank_come_before_the_first_chunk():
    world = world_of(tp_size=2)
    world.arrive(300)
    assert world.questions and not world.steps
    reserve(world)
    for pair in sorted(world.offers):
        assert not world.steps
        world.offer(pair)
    assert [row.end for row in world.steps[0].rows] == [300]


def test_no_smaller_request_overtakes_a_refused_queue_head():
    world = world_of(places=0)
    big, small = world.arrive(3000), world.arrive(10)
    reserve(world)
    assert phase(world, big) is Phase.QUEUED and not world.questions
    world.places = 3
    world.post(ev.CapacityFreed())
    assert [question.request_id for question in world.questions] == [big]
    reserve(world)
    assert [question.request_id for question in world.questions] == [small]


def test_places_reserved_ahead_are_bounded():
    world = world_of(places=100, max_num_seqs=2, max_queued=50, num_slots=50)
    for _ in range(10):
        world.arrive(100)
    while world.decide():
        while world.hear_decode():
            pass
    assert world.planner.roster.phases[Phase.BOOTSTRAPPING] == 4 == 2 * world.limits.max_num_seqs
    world.settle()
    world.check_at_rest()


def test_the_queue_is_bounded_and_the_next_request_is_told_so():
    world = world_of(max_queued=2)
    for _ in range(3):  # the first one is asked about, two wait
        assert world.clients[world.arrive(10)].last is None
    refused = failure(world, world.arrive(10))
    assert refused.code == "overloaded" and "2 requests are queued" in refused.message
    world.settle()
    world.check_at_rest()


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        (0, {}, "empty"),
        (10, {"max_tokens": 0}, "max_tokens = 0"),
        (4000, {"max_tokens": 97}, "4000 prompt tokens and max_tokens = 97 exceed the context length of 4096"),
        (3500, {"max_tokens": 501}, "4000 tokens of one request"),
        (10, {"top_p": 0.0}, "top_p = 0.0"),
        (10, {"temperature": float("nan")}, "temperature = nan"),
        (10, {"top_k": -1}, "top_k = -1"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_value_and_the_rule(prompt, sampling, said):
    world = world_of()
    refused = failure(world, world.arrive(prompt, **sampling))
    assert refused.code == "bad_request" and said in refused.message


def test_a_prompt_beyond_the_prefill_pool_is_refused():
    world = world_of(num_blocks=11, verify_width=8)
    assert "holds 1272" in failure(world, world.arrive(1273)).message
    world.arrive(1272)
    world.settle()
    world.check_at_rest()


def test_a_reservation_that_decode_refuses_for_good_ends_the_request():
    world = world_of()
    request = world.arrive(10)
    world.decide(refuse=ev.Failure("bad_request", "never fits"))
    world.hear_decode()
    assert failure(world, request).message == "never fits"
    world.check_at_rest()


def test_without_a_decode_engine_requests_are_refused_at_once():
    world = World(limits())
    assert failure(world, world.arrive(10)).code == "engine_lost"


# ---- steps
def test_several_chunks_of_one_prompt_are_in_flight_one_batch_more_than_there_are_stages():
    world = world_of(stages=4, num_blocks=60)
    world.arrive(3000)
    start(world)
    assert [(row.start, row.end) for step in world.steps for row in step.rows] == [
        (0, 512), (512, 1024), (1024, 1536), (1536, 2048), (2048, 2560),
    ]  # fmt: skip
    for stage in range(4):
        assert len(world.steps) == 5
        world.answer_step(stage)
    assert (world.steps[5].rows[0].start, world.steps[5].rows[0].end, world.steps[5].rows[0].last) == (2560, 3000, True)


def test_the_incomplete_prompt_takes_budget_first_then_others_in_fifo_order():
    world = world_of(stages=1, chunk_tokens=256)
    for prompt in (600, 50, 60, 300):
        world.arrive(prompt)
        start(world)
    assert [[(row.request_id, row.start, row.end) for row in step.rows] for step in world.steps] == [
        [("r0", 0, 256)],
        [("r0", 256, 512)],
    ]
    run_steps(world)
    assert [(row.request_id, row.start, row.end) for row in world.steps[2].rows] == [
        ("r0", 512, 600), ("r1", 0, 50), ("r2", 0, 60),
    ]  # fmt: skip


def test_long_prompts_leave_half_of_the_batch_to_short_ones_that_wait():
    world = world_of(stages=1, chunk_tokens=1024, num_blocks=100, max_num_seqs=8, num_slots=9, places=8)
    world.arrive(3900)
    start(world)
    for prompt in (300, 400, 500):
        world.arrive(prompt)
        start(world)
    world.advance(1.1)
    world.answer_step(0)
    assert [(row.request_id, row.start, row.end) for row in world.steps[2].rows] == [
        ("r0", 2048, 2560), ("r1", 0, 300), ("r2", 0, 128),
    ]  # fmt: skip


def test_the_completing_chunk_has_blocks_for_the_drafters_rows():
    world = world_of(verify_width=8)
    world.arrive(256)
    start(world)
    assert len(world.steps[0].rows[0].new_blocks) == 3


def test_a_decode_place_is_given_back_when_blocks_stay_taken_and_asked_for_again_when_they_are_free():
    world = world_of(num_blocks=11)
    first = world.arrive(1000, timeout=300)
    start(world)
    run_steps(world)
    second = world.arrive(1000, timeout=300)
    start(world)
    assert phase(world, second) is Phase.READY
    world.advance(1.9)
    assert phase(world, second) is Phase.READY
    world.advance(0.2)
    assert phase(world, second) is Phase.RELEASING
    for pair in sorted(world.draining):
        world.drain(pair)
    world.leave_decode(room(world, second))
    world.hear_decode()
    assert phase(world, second) is Phase.QUEUED and not world.questions, "no place before the blocks are free"
    for pair in world.sendable():
        world.ack(pair)
        world.release(pair)
    assert [(question.request_id, question.attempt) for question in world.questions] == [(second, 2)]
    world.settle()
    world.check_at_rest()
    assert isinstance(world.clients[first].last, ev.PublishHandedOver)
    assert isinstance(world.clients[second].last, ev.PublishHandedOver) and world.clients[second].attached == 2


def test_no_younger_prompt_starts_before_one_that_waits_for_blocks():
    world = world_of(num_blocks=21, places=8, num_slots=9)
    world.arrive(1400, timeout=300)
    start(world)
    run_steps(world)
    big = world.arrive(2000, timeout=300)
    start(world)
    small = world.arrive(10, timeout=300)
    start(world)
    assert phase(world, big) is phase(world, small) is Phase.READY
    world.advance(2.1)
    assert phase(world, big) is phase(world, small) is Phase.RELEASING, "both decode places are given back"
    world.settle()
    world.check_at_rest()
    order = list(dict.fromkeys(row.request_id for step in world.steps for row in step.rows))
    assert order.index(big) < order.index(small)


def test_a_decode_place_is_kept_by_a_prompt_that_waits_for_its_turn_only():
    world = world_of(stages=1, num_blocks=60, places=8, num_slots=9, max_num_seqs=1)
    world.arrive(2500, timeout=300)
    start(world)
    second = world.arrive(10, timeout=300)
    start(world)
    world.advance(10)
    assert phase(world, second) is Phase.READY


def test_no_prompt_starts_that_could_take_the_blocks_which_a_running_one_still_needs():
    world = world_of(stages=1, num_blocks=21)
    world.arrive(2000, timeout=300)
    start(world)
    second = world.arrive(800, timeout=300)
    start(world)
    world.answer_step(0)
    assert world.planner.roster.pool.blocks.free_count > 7 and phase(world, second) is Phase.READY
    world.settle()
    world.check_at_rest()


def test_a_step_is_done_when_every_stage_has_said_so_in_whatever_order():
    world = world_of(stages=3)
    request = world.arrive(10)
    start(world)
    world.answer_step(2)
    world.answer_step(0)
    assert phase(world, request) is Phase.PREFILLING
    world.answer_step(1)
    assert phase(world, request) is Phase.TRANSFERRING


def test_stage_answers_out_of_order_end_the_process():
    world = world_of()
    world.arrive(600)
    start(world)
    with pytest.raises(RuntimeError, match="step order"):
        world.planner.apply(ev.StepDone(2, 0, 0.0, 0.0), world.now)


# ---- handoff
def test_the_client_is_handed_over_at_the_install_and_blocks_wait_for_every_rank():
    world = world_of(tp_size=2)
    request = world.arrive(200)
    start(world)
    run_steps(world)
    pairs = world.sendable()
    assert len(pairs) == 4
    for pair in pairs:
        world.ack(pair)
    for pair in pairs[:2]:
        world.release(pair)
    world.install(pairs[0][0])
    world.hear_decode()
    assert isinstance(world.clients[request].last, ev.PublishHandedOver)
    world.release(pairs[2])
    assert world.planner.counters()["blocks_used"] == 2 and world.planner.counters()["pins"] == 1
    world.release(pairs[3])
    world.check_at_rest()


def test_a_decode_engine_that_is_faster_than_the_last_stages_report_changes_nothing():
    world = world_of(stages=1)
    request = world.arrive(200)
    start(world)
    (pair,) = world.sendable()
    world.ack(pair)
    world.release(pair)
    world.install(pair[0])
    world.hear_decode()
    assert isinstance(world.clients[request].last, ev.PublishHandedOver)
    assert world.planner.counters()["blocks_used"] == 2, "the step is still in flight"
    run_steps(world)
    world.check_at_rest()


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason", "stop"),
    [
        (3, {}, "stop", END),
        (4, {"stop_token_ids": (OTHER,)}, "stop", OTHER),
        (3, {"ignore_eos": True, "max_tokens": 1}, "length", None),
    ],
)
def test_a_first_token_that_ends_the_request_finishes_it_here(prompt, sampling, reason, stop):
    world = world_of()
    request = world.arrive(prompt, **sampling)
    start(world)
    run_steps(world)
    client = world.clients[request]
    assert client.tokens == 1 and client.last == ev.PublishFinished(request, ev.Finished(reason, prompt, 0, stop))
    assert client.states[-1] is State.FINISHED
    assert any(isinstance(effect, ev.CancelOnDecode) and effect.finished_on_prefill for effect in world.effects)
    world.settle()
    world.check_at_rest()


def test_an_end_token_that_is_to_be_ignored_goes_on_to_decode():
    world = world_of()
    request = world.arrive(3, ignore_eos=True, max_tokens=2)
    world.settle()
    assert isinstance(world.clients[request].last, ev.PublishHandedOver)


def test_the_journal_gets_every_chunk_of_every_stage():
    world = world_of(stages=2)
    request = world.arrive(700)
    start(world)
    notes: list[ev.WriteTransition] = []
    keep, world.note = world.note, lambda effect: (notes.append(effect), keep(effect))[1]
    world.settle()
    (prefilled,) = [note for note in notes if "chunks" in note.fields]
    assert prefilled.request_id == request and prefilled.state is State.TRANSFERRING
    assert json.loads(str(prefilled.fields["chunks"])) == [
        [0, 0, 512, 1.0, 2.0], [1, 0, 512, 1.0, 2.0], [0, 512, 700, 1.0, 2.0], [1, 512, 700, 1.0, 2.0],
    ]  # fmt: skip
    assert notes[-1].fields["bytes_sent"] == 2000
    assert notes[-1].owner == "decode-0" and {note.owner for note in notes[:-1]} == {""}, "D has it from the end on"


# ---- the end before the handoff
def test_a_cancelled_prompt_gets_no_new_chunk_and_keeps_its_blocks_until_steps_and_agents_are_through():
    world = world_of(stages=2)
    request = world.arrive(2000)
    start(world)
    assert len(world.steps) == 3
    world.post(ev.CancelRequested(request, "gone"))
    assert failure(world, request).code == "cancelled"
    for pair in sorted(world.draining):
        world.drain(pair)
    world.leave_decode(room(world, request))
    world.hear_decode()
    assert world.planner.counters()["blocks_used"] == 12, "three launched steps may still write to them"
    run_steps(world)
    assert len(world.steps) == 3
    world.check_at_rest()


def test_a_cancel_while_decode_is_asked_waits_for_the_answer_and_gives_the_place_back():
    world = world_of()
    request = world.arrive(100)
    world.post(ev.CancelRequested(request, "gone"))
    assert failure(world, request).code == "cancelled" and phase(world, request) is Phase.RESERVING
    reserve(world)
    assert world.on_decode == {room(world, request): "ending"}
    world.settle()
    world.check_at_rest()


def test_a_cancelled_queued_request_costs_nothing():
    world = world_of(places=0)
    world.arrive(100)
    reserve(world)
    request = world.arrive(100)
    world.post(ev.CancelRequested(request, "gone"))
    assert world.clients[request].gone and not world.draining


def test_cancel_is_idempotent_and_knows_no_strangers():
    world = world_of()
    request = world.arrive(100)
    for name in (request, request, RequestId("stranger")):
        world.post(ev.CancelRequested(name, "again"))
    world.settle()
    world.check_at_rest()
    assert world.planner.totals["requests_cancelled"] == 1


def test_the_bootstrap_timer_starts_with_the_manifest_and_not_in_the_queue():
    world = world_of(places=0)
    request = world.arrive(100, timeout=1000)
    reserve(world)
    world.advance(500)
    world.places = 1
    world.post(ev.CapacityFreed())
    reserve(world)
    world.advance(119)
    assert phase(world, request) is Phase.BOOTSTRAPPING
    world.advance(2)
    assert failure(world, request).detail == "PD_TIMEOUT_BOOT" and "[0, 1]" in failure(world, request).message


@pytest.mark.parametrize("progress", range(5))
def test_a_deadline_ends_the_request_wherever_it_is(progress):
    world = world_of()
    request = world.arrive(2000, timeout=5)
    moves = [reserve, lambda it: [it.offer(pair) for pair in sorted(it.offers)], lambda it: it.answer_step(0), run_steps]
    for move in moves[:progress]:
        move(world)
    world.advance(6)
    assert failure(world, request).code == "deadline_exceeded" and "5 s" in failure(world, request).message
    world.settle()
    world.check_at_rest()


def test_a_broken_transfer_is_tried_once_more_with_a_new_room():
    world = world_of()
    request = world.arrive(200)
    rooms = set()
    for _ in range(2):
        start(world)
        rooms.add(room(world, request))
        world.agent_fails(min(world.armed), ev.Failure("transfer_failed", "UCX says no", "PD_TRANSFER"))
        run_steps(world)
        for pair in sorted(world.draining):
            world.drain(pair)
        for ending in list(world.on_decode):
            world.leave_decode(ending)
        world.hear_decode()
    assert len(rooms) == 2
    assert failure(world, request) == ev.Failure("transfer_failed", "UCX says no", "PD_TRANSFER")
    world.check_at_rest()


def test_a_failure_on_decode_reaches_the_client_with_its_own_code():
    world = world_of()
    request = world.arrive(200)
    start(world)
    world.leave_decode(room(world, request), ev.Failure("transfer_failed", "checksums differ", "PD_BYTES"))
    world.hear_decode()
    assert failure(world, request).detail == "PD_BYTES"
    assert {pair[0] for pair in world.draining} == {room(world, request)}
    world.settle()
    world.check_at_rest()


def test_an_agent_that_was_told_to_stop_by_decode_leaves_the_last_word_to_decode():
    world = world_of()
    request = world.arrive(200)
    start(world)
    world.agent_fails(min(world.armed), ev.Failure("cancelled", "D says so"))
    assert world.clients[request].last is None
    world.leave_decode(room(world, request), ev.Failure("transfer_failed", "it broke on D", "PD_CAND"))
    world.hear_decode()
    assert failure(world, request).detail == "PD_CAND"


# ---- loss
def test_a_lost_decode_engine_fails_what_it_has_not_installed_and_nothing_else():
    world = world_of(places=8, max_num_seqs=8, num_slots=9)
    installed = world.arrive(100)
    start(world)
    run_steps(world)
    for pair in world.sendable():
        world.ack(pair)
    world.install(room(world, installed))
    world.hear_decode()
    running, asked, queued = world.arrive(2000), None, None
    start(world)
    asked, queued = world.arrive(10), world.arrive(10)
    world.lose_decode()
    assert isinstance(world.clients[installed].last, ev.PublishHandedOver)
    for request in (running, asked, queued):
        assert failure(world, request).code == "engine_lost"
    assert failure(world, world.arrive(10)).code == "engine_lost"
    world.settle()
    world.check_at_rest()
    world.connect()
    again = world.arrive(10)
    world.settle()
    assert isinstance(world.clients[again].last, ev.PublishHandedOver)


def test_the_journal_of_a_lost_decode_engine_ends_with_what_was_still_held_for_it():
    world = world_of()
    request = world.arrive(100)
    start(world)
    run_steps(world)
    for pair in world.sendable():
        world.ack(pair)
    world.install(room(world, request))
    world.hear_decode()
    world.lose_decode()
    world.settle()
    assert world.clients[request].states[-1] is State.FAILED
    world.check_at_rest()


def test_a_decode_scheduler_that_does_not_answer_is_given_up():
    world = world_of()
    request = world.arrive(10, timeout=1000)
    world.advance(31)
    assert failure(world, request).code == "engine_lost" and world.planner.decode is None


def test_a_lost_engine_fails_everyone_once_and_plans_nothing_more():
    world = world_of()
    running, waiting = world.arrive(3000), world.arrive(10)
    start(world)
    world.post(ev.EngineFailed(ev.Failure("engine_lost", "prefill worker 1 is lost")))
    for request in (running, waiting):
        assert "prefill worker 1 is lost" in failure(world, request).message
    assert isinstance(world.effects[-1], ev.LoseEngine)
    assert world.planner.plan(world.now) is None and world.planner.next_deadline() is None
    world.check_at_rest()


def test_stages_that_stop_answering_lose_the_engine():
    world = world_of()
    world.arrive(2000, timeout=1000)
    start(world)
    world.advance(100)
    world.answer_step(0)
    world.advance(119)
    assert not world.stopped
    world.advance(2)
    assert world.stopped


def test_agents_that_do_not_let_go_lose_the_engine():
    world = world_of()
    request = world.arrive(10)
    start(world)
    run_steps(world)
    world.post(ev.CancelRequested(request, "gone"))
    world.advance(61)
    assert world.stopped


def test_a_message_that_no_rule_covers_names_the_request():
    world = world_of()
    world.arrive(10)
    with pytest.raises(RuntimeError, match=r"no rule for RoomInstalled.*r0"):
        world.planner.apply(ev.RoomInstalled(room(world, RequestId("r0"))), world.now)


def test_messages_about_a_room_that_is_over_are_ignored():
    world = world_of()
    for late in (
        ev.RoomReady(GlobalRank(0), Room(5)),
        ev.Drained(GlobalRank(0), Room(5)),
        ev.ReserveAnswered(Room(5), True, Replica(0), 0, 0),
        ev.RoomEnded(Room(5)),
    ):
        world.post(late)
    assert not world.effects and world.planner.totals["late_messages"] == 4


# ---- drain
def test_draining_takes_no_one_in_and_tells_when_the_last_one_is_gone():
    world = world_of()
    request = world.arrive(10)
    world.post(ev.DrainAsked())
    assert not any(isinstance(effect, ev.Emptied) for effect in world.effects)
    assert "draining" in failure(world, world.arrive(10)).message
    world.settle()
    assert isinstance(world.clients[request].last, ev.PublishHandedOver)
    assert any(isinstance(effect, ev.Emptied) for effect in world.effects)
