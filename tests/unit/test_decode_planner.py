"""The decode planner, one rule at a time. The world around it asserts the rest (tests/lib/decode_world.py)."""

from typing import Any

import pytest

from services.contracts.ids import GlobalRank, Place, Room, Token
from services.contracts.lifecycle import State
from services.scheduler.decode import events as ev
from tests.lib.decode_world import END_TOKEN, DecodeWorld, small_shape

TOKEN = Token(9)


class Told(DecodeWorld):
    """Keeps what was said to whom."""

    def perform(self, effects: list[ev.Effect]) -> None:
        self.said = [*getattr(self, "said", []), *effects]
        super().perform(effects)

    def last(self, kind: type) -> Any:
        return [effect for effect in self.said if isinstance(effect, kind)][-1]

    def resident(self, prompt: int = 100, max_tokens: int = 50, **changes: Any) -> Room:
        room = self.reserve(prompt, max_tokens, **changes)
        self.attach(room)
        self.all_ready(room, TOKEN)
        assert self.rooms[room].installed
        return room

    def run(self, count: int, token: Token = TOKEN) -> None:
        for _ in range(count):
            assert self.launch() is not None
            self.round_done(token)

    def end_of(self, room: Room) -> Any:
        return self.rooms[room].end


@pytest.fixture
def world() -> Told:
    return Told(small_shape())


# ---- reservation
def test_replicas_are_filled_evenly(world: Told):
    rooms = [world.reserve(100, 10) for _ in range(6)]
    replicas = [world.rooms[room].manifest.replica for room in rooms]  # pyright: ignore[reportOptionalMemberAccess]
    assert replicas == [0, 1, 0, 1, 0, 1]


def test_a_room_number_is_good_for_one_reservation(world: Told):
    room = world.reserve(100, 10)
    world.apply(world.rooms[room].asked)
    assert world.last(ev.AnswerReserve).failure.detail == "PD_MANIFEST"
    world.cancel_room(room)
    world.all_drained(room)
    world.apply(world.rooms[room].asked)
    assert world.last(ev.AnswerReserve).failure.detail == "PD_MANIFEST"
    world.settle()


def test_a_reservation_that_comes_after_its_own_cancel_is_refused(world: Told):
    world.cancel_room(Room(77))
    assert world.last(ev.RoomEnded).room == 77
    world.apply(ev.ReserveAsked(world.pair, "r", Room(77), 1, 10, b"", ev.Sampling(max_tokens=5), 0.0))  # pyright: ignore
    assert world.last(ev.AnswerReserve).failure.detail == "PD_MANIFEST"


@pytest.mark.parametrize(
    ("prompt", "new", "told"),
    [(0, 5, "prompt_tokens = 0"), (5, 0, "max_tokens = 0"), (1500, 5, "context length 1500"), (900, 200, "= 1100")],
)
def test_what_never_fits_fails_for_good_and_names_the_value(prompt: int, new: int, told: str):
    world = Told(small_shape(num_blocks=8))
    world.reserve(prompt, new)
    answer = world.last(ev.AnswerReserve)
    assert answer.failure.code == "bad_request" and told in answer.failure.message


def test_a_pool_of_one_request_serves_three_one_after_the_other():
    world = Told(small_shape(replicas=1, num_blocks=3))
    waiting = [(200, 20), (200, 20), (200, 20)]
    room = world.reserve(*waiting.pop())
    while True:
        if waiting:
            world.reserve(*waiting[-1])
            assert not world.last(ev.AnswerReserve).accepted
        world.attach(room)
        world.all_ready(room, TOKEN)
        world.run(19)
        assert world.end_of(room) == ev.Finished("length", 200, 20, 0, None)
        if not waiting:
            break
        assert world.last(ev.CapacityFreed).pair == world.pair
        room = world.reserve(*waiting.pop())
    world.settle()


def test_messages_of_a_pair_that_is_gone_reserve_nothing(world: Told):
    old = world.pair
    world.lose_prefill()
    world.apply(ev.ReserveAsked(old, "r", Room(5), 1, 10, b"", ev.Sampling(max_tokens=5), 0.0))  # pyright: ignore
    assert world.planner.counters()["reserved"] == 0


# ---- the transfer
def test_a_rank_of_another_replica_fails_the_room(world: Told):
    room = world.reserve(100, 10)
    world.rank_ready(room, GlobalRank(2))
    world.all_drained(room)
    assert world.last(ev.RoomEnded).failure.detail == "PD_ROUTE"


def test_a_rank_that_says_two_things_fails_the_room_and_one_that_repeats_itself_does_not(world: Told):
    room = world.reserve(100, 10)
    world.rank_ready(room, GlobalRank(0))
    said = world.rooms[room].anchor
    assert said is not None
    world.apply(said)
    assert world.planner.counters()["receiving"] == 1
    world.apply(ev.AgentRankReady(GlobalRank(0), room, said.attempt, Token(1), (Token(1),), 5, 0.0, 0.0, 0))
    world.all_drained(room)
    assert world.last(ev.RoomEnded).failure.detail == "PD_ROUTE"


@pytest.mark.parametrize("window", [(), (Token(8),), (TOKEN, TOKEN)])
def test_a_window_that_cannot_be_is_never_installed(world: Told, window: tuple[Token, ...]):
    room = world.reserve(100, 10)
    attempt = world.rooms[room].asked.attempt
    for rank in (0, 1):
        world.apply(ev.AgentRankReady(GlobalRank(rank), room, attempt, TOKEN, window, 5, 0.0, 0.0, 0))
    world.all_drained(room)
    assert world.last(ev.RoomEnded).failure.detail == "PD_CAND"


def test_messages_of_another_attempt_are_dropped(world: Told):
    room = world.reserve(100, 10)
    other = world.rooms[room].asked.attempt + 1
    world.apply(ev.AgentRankReady(GlobalRank(0), room, other, TOKEN, (TOKEN,), 5, 0.0, 0.0, 0))
    world.apply(ev.AgentRoomFailed(GlobalRank(0), room, other, ev.Failure("transfer_failed", "late")))
    assert world.planner.counters()["reserved"] == 1
    assert world.planner.totals["late_messages"] == 2


def test_a_first_token_that_ends_the_request_is_left_to_prefill(world: Told):
    for room in (world.reserve(100, 1), world.reserve(100, 9, ignore_eos=False)):
        world.attach(room)
        world.all_ready(room, END_TOKEN)
        assert world.planner.counters()["receiving"] == 1
        world.cancel_room(room, finished=True)
        world.all_drained(room)
        assert world.end_of(room) == ev.ToldByPrefill() and not world.rooms[room].published
    world.settle()


# ---- stop rules
@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop"),
    [
        ({"max_tokens": 4}, [5, 6, 7], "length", None),
        ({"max_tokens": 9, "ignore_eos": False}, [5, END_TOKEN], "stop", END_TOKEN),
        ({"max_tokens": 9, "ignore_eos": True, "stops": (Token(6),)}, [END_TOKEN, 6], "stop", 6),
        ({"max_tokens": 3, "ignore_eos": False}, [5, END_TOKEN], "stop", END_TOKEN),
        ({"max_tokens": 500, "prompt": 1497}, [5, 6], "length", None),
    ],
)
def test_how_answers_end(world: Told, sampling: dict[str, Any], tokens: list[int], reason: str, stop: int | None):
    room = world.resident(**{"prompt": 10, **sampling})
    for token in tokens:
        assert world.end_of(room) is None
        world.run(1, Token(token))
    end = world.end_of(room)
    assert (end.reason, end.stop_token, end.completion_tokens) == (reason, stop, len(tokens) + 1)
    assert world.rooms[room].published == [TOKEN, *tokens]
    world.settle()


def test_tokens_after_the_stop_token_of_the_same_round_are_not_published():
    world = Told(small_shape(verify_width=4, adaptive=False), seed=3)
    room = world.reserve(10, 50, stops=(Token(33),))
    world.attach(room)
    world.all_ready(room, TOKEN)
    assert world.launch() is not None
    plan = world.out.popleft()
    accepted = (Token(5), Token(33), Token(6))
    world.rooms[room].truth += accepted
    rows = (ev.PlaceTokens(Place(0), accepted, (Token(6), TOKEN, TOKEN, TOKEN)),)
    world.apply(ev.RoundDone(plan.round_id, (rows, ())))
    assert world.rooms[room].published == [TOKEN, 5, 33]
    assert world.end_of(room).stop_token == 33
    world.settle()


def test_what_was_drafted_for_a_request_is_told_with_its_end():
    world = Told(small_shape(verify_width=4, adaptive=False), seed=3)
    room = world.resident(10, 8)
    for taken in (3, 1, 4):  # the last of these proposals lies behind the answer's end
        assert world.launch() is not None
        plan = world.out.popleft()
        tokens = tuple(Token(n + 40) for n in range(taken))
        world.rooms[room].truth += tokens
        rows = (ev.PlaceTokens(Place(0), tokens, (tokens[-1], TOKEN, TOKEN, TOKEN)),)
        world.apply(ev.RoundDone(plan.round_id, (rows, ())))
    assert world.end_of(room) == ev.Finished("length", 10, 8, 0, None, ev.Drafts(3, 9, 5, (2, 2, 1)))
    told = {"windows": 3, "drafted": 9, "accepted": 5, "accepted_at": "2,2,1"}
    assert told.items() <= dict(world.last(ev.WriteTransition).fields).items()
    totals = world.planner.totals
    assert (totals["windows"], totals["tokens_drafted"], totals["tokens_accepted"]) == (3, 9, 5)
    assert [totals[f"accepted_at_{k}"] for k in (1, 2, 3)] == [2, 2, 1]
    assert (totals["handoff_windows"], totals["handoff_accepted"]) == (1, 2)
    world.settle()


# ---- rounds
def test_the_last_place_is_cleared_by_a_round_in_which_nothing_runs(world: Told):
    world.resident(max_tokens=2)
    world.run(1)
    plan = world.launch()
    assert plan is not None and plan.bucket == 0 and plan.replicas[0].clears == (0,)
    world.round_done()
    assert world.launch() is None


def test_a_request_that_is_cancelled_in_a_round_keeps_what_it_holds_until_the_round_has_landed(world: Told):
    room = world.resident()
    world.launch()
    world.client_gone(room)
    assert world.planner.counters()["finishing"] == 1 and world.planner.counters()["blocks_used"] == 1
    world.round_done()
    assert world.planner.counters()["blocks_used"] == 0
    assert world.rooms[room].states[-1] is State.CANCELLED
    world.settle()


def test_the_newest_resident_makes_room_for_the_others_when_blocks_run_out():
    world = Told(small_shape(replicas=1, num_blocks=11, buckets=(1, 2, 4)))
    old, young = world.resident(prompt=100, max_tokens=1100), world.resident(prompt=100, max_tokens=1100)
    while world.end_of(young) is None:
        world.run(1)
    assert world.end_of(young).code == "capacity_aborted" and "10" in world.end_of(young).message
    assert world.rooms[young].states[-1] is State.ABORTED
    assert dict(world.last(ev.WriteTransition).fields)["err_type"] == 524
    while world.end_of(old) is None:
        world.run(1)
    assert world.end_of(old).reason == "length"
    assert world.planner.totals["capacity_aborts"] == 1
    world.settle()


@pytest.mark.parametrize(
    ("places", "tokens", "window"),
    [
        ((1,), (TOKEN,), (TOKEN,)),
        ((0, 1), (TOKEN,), (TOKEN,)),
        ((0,), (), (TOKEN,)),
        ((0,), (TOKEN, TOKEN), (TOKEN,)),
        ((0,), (TOKEN,), (Token(3),)),
    ],
)
def test_an_answer_that_does_not_fit_its_round_ends_the_engine(world: Told, places: Any, tokens: Any, window: Any):
    room = world.resident()
    plan = world.launch()
    rows = tuple(ev.PlaceTokens(Place(place), tokens, window) for place in places)
    world.apply(ev.RoundDone(plan.round_id, (rows, ())))
    assert world.lost is not None and world.end_of(room).code == "internal"


def test_an_answer_to_no_round_ends_the_engine(world: Told):
    world.apply(ev.RoundDone(1, ((), ())))
    assert world.lost is not None and "no round" in world.lost.message


# ---- time
def test_a_request_out_of_time_ends_wherever_it_is(world: Told):
    reserved = world.reserve(100, 10, timeout=20.0)
    resident = world.resident(timeout=25.0)
    world.attach(reserved)
    world.advance(21)
    world.all_drained(reserved)
    assert world.last(ev.RoomEnded).failure.code == "deadline_exceeded"
    world.advance(5)
    assert world.end_of(resident).code == "deadline_exceeded" and "25 s" in world.end_of(resident).message
    world.settle()


def test_a_client_that_never_attaches_is_given_up(world: Told):
    reserved, whole = world.reserve(100, 10), world.reserve(100, 10)
    world.all_ready(whole, TOKEN)
    world.advance(29)
    assert world.planner.counters()["receiving"] == 1 and not world.rooms[whole].installed
    world.advance(2)
    for room in (reserved, whole):
        world.all_drained(room)
        assert world.last(ev.RoomEnded).failure.code == "cancelled"
        assert world.planner.requests == (1 if room == reserved else 0)
    world.settle()


def test_a_transfer_without_progress_is_given_up_and_its_ranks_are_named(world: Told):
    room = world.reserve(100, 10)
    world.attach(room)
    world.advance(200)
    world.rank_ready(room, GlobalRank(1))
    world.advance(31)
    world.all_drained(room)
    failure = world.last(ev.RoomEnded).failure
    assert failure.detail == "PD_TIMEOUT_WAIT" and "[1]" in failure.message
    world.settle()


def test_each_rank_that_arrives_gives_the_others_more_time():
    world = Told(small_shape(tp_size=3))
    room = world.reserve(100, 10)
    world.attach(room)
    for rank in (0, 1):
        world.rank_ready(room, GlobalRank(rank))
        world.advance(29)
    assert world.planner.counters()["receiving"] == 1
    world.advance(2)
    assert world.planner.counters()["quarantined"] == 1


def test_agents_that_never_drain_and_rounds_that_never_end_lose_the_engine():
    for stuck in ("agent", "round"):
        world = Told(small_shape())
        resident = world.resident()
        if stuck == "agent":
            world.cancel_room(world.reserve(100, 10))
        else:
            world.launch()
        world.advance(119)
        assert world.lost is None
        world.advance(2)
        assert world.lost is not None and world.lost.code == "engine_lost"
        assert world.end_of(resident) == world.lost
        assert not any(world.planner.counters().values())


# ---- loss
def test_when_prefill_is_lost_the_engine_notes_the_end_of_rooms_that_nobody_else_will(world: Told):
    waiting, cancelled = world.reserve(100, 10), world.reserve(100, 10)
    resident = world.resident(max_tokens=3)
    world.attach(waiting)
    world.cancel_room(cancelled)
    world.lose_prefill()
    assert world.end_of(waiting).code == "engine_lost" and world.end_of(resident) is None
    world.all_drained(waiting)
    world.all_drained(cancelled)
    assert [world.rooms[room].states[-1] for room in (waiting, cancelled)] == [State.FAILED, State.CANCELLED]
    assert not world.rooms[waiting].ended and not world.rooms[cancelled].ended
    world.run(2)
    assert world.end_of(resident).reason == "length"
    world.settle()


def test_when_the_engine_is_lost_everyone_is_told_and_nothing_is_planned_any_more(world: Told):
    waiting, resident, running = world.reserve(100, 10), world.resident(), world.resident()
    world.launch()
    world.client_gone(running)
    failure = ev.Failure("engine_lost", "worker 1 died")
    world.apply(ev.EngineFailed(failure))
    assert world.end_of(resident) == failure and world.rooms[waiting].ended
    assert world.rooms[resident].states[-1] is State.FAILED and world.rooms[running].states[-1] is State.CANCELLED
    assert world.planner.plan(world.now) is None and world.planner.next_deadline() is None
    assert world.planner.apply(ev.CancelRequested(world.rooms[waiting].asked.request_id, "late"), world.now) == []


def test_a_cancel_from_prefill_that_crosses_the_installation_is_answered_when_the_request_is_gone(world: Told):
    room = world.resident()
    world.launch()
    world.cancel_room(room, ev.Failure("deadline_exceeded", "time is up"))
    assert world.end_of(room).code == "deadline_exceeded" and not world.rooms[room].ended
    world.round_done()
    assert world.rooms[room].ended
    world.settle()


# ---- clients
def test_a_client_that_attaches_after_a_failure_hears_of_it(world: Told):
    room = world.reserve(100, 10)
    world.rank_failed(room)
    world.all_drained(room)
    world.attach(room)
    assert world.last(ev.PublishEnd).end == ev.ToldByPrefill()


def test_nothing_is_installed_for_a_client_that_is_not_here(world: Told):
    room = world.reserve(100, 3)
    world.all_ready(room, TOKEN)
    assert not world.rooms[room].installed and world.launch() is None
    world.attach(room)
    assert world.rooms[room].installed
    world.run(2)
    assert world.end_of(room).completion_tokens == 3 and world.planner.requests == 0


def test_a_stream_of_tokens_has_one_reader(world: Told):
    room = world.resident(max_tokens=3)
    second = world.attach(room)
    refused = world.last(ev.PublishEnd)
    assert (refused.client, refused.end.code) == (second, "bad_request")
    world.run(2)
    assert world.end_of(room).reason == "length"
    world.attach(room)
    assert world.last(ev.PublishEnd).end.code == "bad_request"


def test_draining_admits_nobody_and_says_when_all_are_gone(world: Told):
    room = world.resident(max_tokens=3)
    world.apply(ev.DrainAsked())
    assert world.emptied == 0
    world.reserve(100, 10)
    assert world.last(ev.AnswerReserve).failure.code == "engine_lost"
    world.run(2)
    assert world.end_of(room).reason == "length" and world.emptied == 1
    world.apply(ev.DrainAsked())
    assert world.emptied == 2


# ---- the journal
def test_each_transition_carries_its_figures_and_a_rising_version(world: Told):
    room = world.reserve(200, 5)
    world.attach(room)
    world.now += 2
    world.all_ready(room, TOKEN)
    world.launch()
    world.now += 0.5
    world.round_done(TOKEN)
    world.now += 0.5
    world.run(3)
    written = {effect.state: dict(effect.fields) for effect in world.said if isinstance(effect, ev.WriteTransition)}
    assert list(written) == [State.RESERVED, State.INSTALLED, State.DECODING, State.FINISHING, State.FINISHED]
    assert written[State.RESERVED] | {"room": 0} == {
        "room": 0, "attempt": world.rooms[room].asked.attempt, "d_engine": "decode-0", "d_epoch": 7, "replica": 0, "blocks": 2,
    }  # fmt: skip
    installed = written[State.INSTALLED]
    assert (installed["bytes"], installed["transfer_seconds"], installed["gb_s"]) == (2000, 2.0, 0.0)
    assert installed["waited_seconds"] == 2.0
    assert written[State.FINISHED] == {
        "reason": "length", "rounds": 4, "completion_tokens": 5, "seconds": 1.0, "tokens_per_s": 4.0,
    }  # fmt: skip
