"""The prefill scheduler's decisions: who gets a decode place next, what the next step runs, when a request is over and
what it held may be used again (spec scheduling §2, §4, §6, §7). The states and their picture are in request.py."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import inf
from random import Random
from typing import Any, ClassVar

import services.scheduler.prefill.events as ev
from services.contracts.events import DeadlinePassed
from services.contracts.ids import BLOCK_TOKENS, Room, Token
from services.contracts.lifecycle import TERMINAL, State
from services.scheduler.alarm import WRONG_BYTES, Alarm
from services.scheduler.prefill import invariants, report
from services.scheduler.prefill.admission import Limits, refusal
from services.scheduler.prefill.chunking import fill
from services.scheduler.prefill.pipeline import Pipeline, Step
from services.scheduler.prefill.request import (
    Bootstrapping,
    HandedOver,
    Phase,
    Prefilling,
    Ready,
    Releasing,
    Request,
    Reserving,
    Timeline,
    Transferring,
)
from services.scheduler.prefill.roster import Roster

TRIED_AGAIN = {"PD_TRANSFER"}  # transfer errors that a new room may cure; the others would come back
MAX_TRANSFERS = 2  # attempts of one request that may end with such an error
BEFORE_HANDOFF = (Phase.BOOTSTRAPPING, Phase.READY, Phase.PREFILLING, Phase.TRANSFERRING)


class PrefillPlanner:
    """Events in, effects out. `rng` draws rooms; time is in seconds and an argument."""

    def __init__(self, limits: Limits, rng: Random):
        self.limits = limits
        self.draining = False
        self.decode: ev.DecodeConnected | None = None
        self.roster = Roster(limits)
        self.alarm = Alarm()
        self._health_told = ""
        self.pipeline = Pipeline(limits.stages)
        self._rng = rng
        self._decode_full = False  # it refused a place; CapacityFreed clears this
        self._lost = False
        self._emptied_due = False
        self._arrivals = 0

    # ---- the four doors
    def apply(self, event: Any, now: float) -> list[ev.Effect]:
        self.roster.now, self.roster.effects = now, []
        if not self._lost:
            self.HANDLERS[type(event)](self, event)
            self._reserve_next()
            self._say_when_empty()
            self._say_how_it_is()
        return self.roster.effects

    def plan(self, now: float) -> ev.PrefillStep | None:
        """The next batch, if the pipeline has a place for it."""
        if self._lost or self.pipeline.full:
            return None
        self.roster.now, self.roster.effects = now, []
        rows = fill(self.roster)
        if not rows:
            return None
        self.roster.totals["steps"] += 1
        transitions = tuple(effect for effect in self.roster.effects if isinstance(effect, ev.WriteTransition))
        return ev.PrefillStep(self.pipeline.launch(rows, now), rows, transitions)

    def next_deadline(self) -> float | None:
        times = [self.roster.timers.next()]
        times.append(self.alarm.next_change(self.roster.now))
        if self.pipeline.steps:
            times.append(self.pipeline.progressed_at + self.limits.step_timeout)
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Every invariant; raises AssertionError."""
        invariants.check(self)

    def counters(self) -> dict[str, int]:
        """What is going on now; all 0 when nothing is."""
        return {**self.roster.counters(), "batches_in_flight": len(self.pipeline.steps)}

    def cache(self) -> dict[str, int]:
        """What the prefix cache has; it stays when nothing is going on."""
        cache = self.roster.pool.cache
        return {"cached_blocks": cache.cached_blocks, "cached_checkpoints": cache.cached_checkpoints}

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that both engines take; it leaves room for one new token."""
        decode = self.decode.max_request_tokens if self.decode else self.limits.max_model_len
        return min(self.limits.max_model_len - 1, self.limits.max_prompt_tokens, decode - 1)

    @property
    def totals(self) -> Counter[str]:
        """Counts since the start."""
        cache = self.roster.pool.cache
        evictions = {"prefix_cache_evictions": cache.blocks_evicted, "checkpoint_evictions": cache.checkpoints_evicted}
        return Counter({**self.roster.totals, **evictions})

    # ---- arrival and reservation
    def _arrive(self, event: ev.RequestArrived) -> None:
        roster = self.roster
        if event.request_id in roster.requests:
            raise RuntimeError(f"{event}: this id is in use")
        roster.totals["requests_received"] += 1
        failure = self._refusal(event)
        if failure is not None:
            roster.totals["requests_refused"] += 1
            roster.emit(ev.PublishFailure(event.request_id, failure), ev.RequestGone(event.request_id))
            return
        roster.totals["prompt_tokens"] += event.prompt_tokens
        self._arrivals += 1
        request = Request(
            request_id=event.request_id,
            order=self._arrivals,
            prompt_tokens=event.prompt_tokens,
            keys=event.keys,
            sampling=event.sampling,
            arrived=roster.now,
            deadline=roster.now + event.timeout,
            timeline=Timeline(queued=roster.now),
        )
        roster.emit(ev.PublishQueued(event.request_id, len(roster.queue) + roster.phases[Phase.RESERVING]))
        roster.add(request)
        roster.write(request, State.QUEUED, report.queued(request))

    def _refusal(self, event: ev.RequestArrived) -> ev.Failure | None:
        if self.draining:
            return ev.Failure("engine_lost", f"{self.limits.engine_id} is draining and takes no new requests; try again later")
        if self.decode is None:
            return ev.Failure("engine_lost", "the decode engine is not connected; try again in a few seconds", "DECODE")
        if unhealthy := self.alarm.reason(self.roster.now):
            return ev.Failure("engine_lost", f"{self.limits.engine_id} is unhealthy: {unhealthy}", WRONG_BYTES)
        failure = refusal(event, self.limits, self.decode.max_request_tokens)
        if failure is None and len(self.roster.queue) >= self.limits.max_queued:
            message = f"{len(self.roster.queue)} requests are queued, which is the limit; try again later"
            return ev.Failure("overloaded", message, "QUEUE")
        return failure

    def _reserve_next(self) -> None:
        """Ask D for the queue head's place. One question at a time: so no smaller request overtakes the head."""
        roster = self.roster
        ahead = roster.phases[Phase.BOOTSTRAPPING] + roster.phases[Phase.READY]
        asking = roster.phases[Phase.RESERVING] > 0 or self._decode_full or self.decode is None
        if asking or not roster.queue or ahead >= self.limits.reserved_ahead:
            return
        head = roster.queue[0]
        if head in roster.wanting and roster.lacks_blocks(head):
            return
        head.room = self._new_room()
        roster.rooms[head.room] = head
        roster.enter(head, Reserving(roster.now + self.limits.answer_timeout))
        timeout = max(0.001, head.deadline - roster.now)
        asked = ev.Reserve(head.request_id, head.room, head.attempt, head.prompt_tokens, head.sampling, timeout, head.keys)
        roster.emit(asked)

    def _new_room(self) -> Room:
        while (room := Room(self._rng.getrandbits(63))) in self.roster.rooms or room == 0:
            pass
        return room

    def _answered(self, request: Request, event: ev.ReserveAnswered) -> None:
        state, roster = request.state, self.roster
        assert isinstance(state, Reserving)
        if event.accepted:
            request.replica, request.prefix_tokens = event.replica, event.prefix_tokens
            request.proposals = event.proposals
            request.timeline.reserved = roster.now
            if state.then is State.BOOTSTRAPPING:
                self._bootstrap(request, state)
            else:
                roster.release(request, state.then)
        elif state.then in TERMINAL:
            roster.end(request, state.then)
        elif event.failure is not None:
            roster.tell(request, event.failure)
            roster.end(request, State.FAILED)
        else:
            self._decode_full = True
            roster.queue_again(request)

    def _bootstrap(self, request: Request, state: Reserving) -> None:
        """D has told its agents; they offer the manifest to ours."""
        assert self.decode is not None
        request.decode = self.decode.engine_id
        self.roster.write(request, State.BOOTSTRAPPING, report.reserved(request, self.decode))
        self.roster.emit(ev.PublishAttached(request.request_id, request.room))
        waiting = set(self.roster.ranks - state.ready)
        self.roster.enter(request, Bootstrapping(waiting, self.roster.now + self.limits.ready_timeout))
        self._when_all_ready(request, waiting)

    def _early_ready(self, request: Request, event: ev.RoomReady) -> None:
        assert isinstance(request.state, Reserving)
        request.state.ready.add(event.rank)

    def _rank_ready(self, request: Request, event: ev.RoomReady) -> None:
        assert isinstance(request.state, Bootstrapping)
        request.state.waiting.discard(event.rank)
        self._when_all_ready(request, request.state.waiting)

    def _when_all_ready(self, request: Request, waiting: set[Any]) -> None:
        if not waiting:
            request.timeline.ready = self.roster.now
            self.roster.enter(request, Ready())

    # ---- steps
    def _step_done(self, event: ev.StepDone) -> None:
        step = self.pipeline.answer(event, self.roster.now)
        if step is not None:
            for row in step.rows:
                self._chunk_done(self.roster.rooms[row.room], row, step)

    def _chunk_done(self, request: Request, row: ev.ChunkRow, step: Step) -> None:
        state = request.state
        assert isinstance(state, Prefilling | Releasing)
        state.in_flight -= 1
        assert state.holding is not None, "launched steps keep it"
        self.roster.pool.written(state.holding, request.keys[: row.end // BLOCK_TOKENS], row.save_slot or None)
        request.timeline.chunks += [(stage, row.start, row.end, *span) for stage, span in sorted(step.spans.items())]
        if isinstance(state, Releasing):
            self.roster.settle(request)
        elif row.last:
            self._prefilled(request, state, step.first_tokens[row.room])

    def _prefilled(self, request: Request, state: Prefilling, token: Token) -> None:
        roster = self.roster
        request.timeline.prefilled = roster.now
        roster.write(request, State.TRANSFERRING, report.prefilled(request))
        done_by = roster.now + self.limits.transfer_timeout
        if state.installed:
            roster.enter(request, HandedOver(state.holding, state.unreleased, done_by))
            self._when_released(request)
        elif (finished := self._finish_of(request, token)) is not None:
            request.told = True
            roster.emit(ev.PublishTokens(request.request_id, (token,)), ev.PublishFinished(request.request_id, finished))
            roster.write(request, State.FINISHED, report.finished(request, finished))
            roster.release(request, State.FINISHED)
        else:
            roster.enter(request, Transferring(state.holding, state.unreleased, done_by))
            self._when_released(request)

    def _finish_of(self, request: Request, token: Token) -> ev.Finished | None:
        sampling = request.sampling
        ends = token in sampling.stop_token_ids or (token in self.limits.end_tokens and not sampling.ignore_eos)
        if not ends and sampling.max_tokens > 1:
            return None
        return ev.Finished("stop" if ends else "length", request.prompt_tokens, request.cached_tokens, token if ends else None)

    # ---- handoff
    def _installed(self, request: Request, _: ev.RoomInstalled) -> None:
        request.told = True
        self.roster.emit(ev.PublishHandedOver(request.request_id))
        match request.state:
            case Transferring(holding=None):
                self.roster.end(request, State.INSTALLED)
            case Transferring(holding=holding, unreleased=unreleased, done_by=done_by):
                assert holding is not None
                self.roster.enter(request, HandedOver(holding, unreleased, done_by))
            case state:
                assert isinstance(state, Prefilling)
                state.installed = True

    def _source_released(self, request: Request, event: ev.SourceReleased) -> None:
        request.timeline.bytes += event.bytes
        match request.state:
            case Releasing():
                self._drained(request, event)
            case state:
                assert isinstance(state, Prefilling | Transferring | HandedOver)
                state.unreleased.discard(event.rank)
                self._when_released(request)

    def _when_released(self, request: Request) -> None:
        match request.state:
            case Transferring(holding=holding) as state if holding is not None and not state.unreleased:
                self.roster.give_back(request, holding)
                state.holding = None
            case HandedOver() as state if not state.unreleased:
                self.roster.give_back(request, state.holding)
                self.roster.end(request, State.INSTALLED)
            case _:
                pass

    # ---- cancellation and failure of one room
    def _cancel(self, event: ev.CancelRequested) -> None:
        request = self.roster.requests.get(event.request_id)
        if request is not None and not request.told:
            failure = ev.Failure("cancelled", f"{event.request_id} was cancelled: {event.reason}")
            self.roster.stop(request, State.CANCELLED, failure)

    def _room_failed(self, request: Request, event: ev.RoomFailed) -> None:
        if event.failure.code != "cancelled":  # else D has cancelled it, and its RoomEnded will say why
            self._room_lost(request, event.failure, on_decode=True)

    def _room_ended(self, request: Request, event: ev.RoomEnded) -> None:
        cancelled = ev.Failure("cancelled", f"{request.request_id} was cancelled on the decode engine")
        self._room_lost(request, event.failure or cancelled, on_decode=False)

    def _room_lost(self, request: Request, failure: ev.Failure, on_decode: bool) -> None:
        """The room is dead on one side."""
        if request.is_handed_over:
            self.roster.release(request, State.INSTALLED, on_decode=False)
        elif failure.detail in TRIED_AGAIN and request.transfers_failed + 1 < MAX_TRANSFERS:
            request.transfers_failed += 1
            self.roster.stop(request, State.QUEUED, failure, on_decode)
        else:
            then = State.CANCELLED if failure.code == "cancelled" else State.FAILED
            self.roster.stop(request, then, failure, on_decode)

    def _drained(self, request: Request, event: ev.Drained | ev.SourceReleased) -> None:
        assert isinstance(request.state, Releasing)
        request.state.undrained.discard(event.rank)
        self.roster.settle(request)

    def _decode_is_rid(self, request: Request, _: ev.RoomEnded) -> None:
        assert isinstance(request.state, Releasing)
        request.state.on_decode = False
        self.roster.settle(request)

    # ---- time, loss, drain
    def _deadline(self, _: DeadlinePassed) -> None:
        for request in self.roster.timers.pop_due(self.roster.now):
            self._expire(request)
        if self.pipeline.steps and self.roster.now >= self.pipeline.progressed_at + self.limits.step_timeout:
            step = min(self.pipeline.steps)
            self._lose(f"no stage has answered for {self.limits.step_timeout:g} s; step {step} is the oldest in flight")

    def _expire(self, request: Request) -> None:
        """Its own deadline, or the time that its state may take, has passed."""
        limits, now, roster = self.limits, self.roster.now, self.roster
        if now >= request.deadline and not request.told:
            roster.stop(request, State.FAILED, report.out_of_time(request))
            return
        match request.state:
            case Reserving() as state:
                state.answer_by = now + limits.answer_timeout
                roster.emit(ev.DropDecode(f"no answer to a reservation within {limits.answer_timeout:g} s"))
            case Bootstrapping(waiting=ranks):
                message = f"agents of ranks {sorted(ranks)} did not accept the manifest within {limits.ready_timeout:g} s"
                roster.stop(request, State.FAILED, ev.Failure("transfer_failed", message, "PD_TIMEOUT_BOOT"))
            case Ready() as state if not roster.lacks_blocks(request):
                state.hold_until = inf
            case Ready():
                roster.wanting.add(request)
                roster.release(request, State.QUEUED)
            case Transferring():
                message = f"the decode engine has not installed the request {limits.transfer_timeout:g} s after its first token"
                roster.stop(request, State.FAILED, ev.Failure("transfer_failed", message, "PD_TIMEOUT_WAIT"))
            case HandedOver():
                roster.release(request, State.INSTALLED, on_decode=False)
            case Releasing(undrained=ranks) if ranks:
                what = f"agents of ranks {sorted(ranks)} did not let go of room {request.room}"
                self._lose(f"{what} within {limits.drain_timeout:g} s")
            case Releasing() as state:
                state.done_by = now + limits.drain_timeout
                if not state.in_flight:  # D looks after its own memory
                    state.on_decode = False
                    roster.settle(request)
            case _:
                raise AssertionError(f"no time limit for {request}")

    def _connected(self, event: ev.DecodeConnected) -> None:
        self.decode = event

    def _capacity_freed(self, _: ev.CapacityFreed) -> None:
        self._decode_full = False

    def _decode_lost(self, event: ev.DecodeLost) -> None:
        self.decode, self._decode_full = None, False
        message = f"the decode engine was lost ({event.reason}); try again in a few seconds"
        self.roster.lose_decode(ev.Failure("engine_lost", message, "DECODE"))

    def _engine_failed(self, event: ev.EngineFailed) -> None:
        self._lose(event.failure.message)

    def _lose(self, reason: str) -> None:
        """Fail everyone and stop for good: the supervisor starts the engine anew."""
        failure = ev.Failure("engine_lost", f"prefill engine {self.limits.engine_id}: {reason}; try again in a few seconds")
        self.roster.lose_engine(failure)
        self.pipeline.steps.clear()
        self.decode, self._lost = None, True
        self.roster.emit(ev.LoseEngine(failure))

    def _drain(self, _: ev.DrainAsked) -> None:
        self.draining = self._emptied_due = True

    def _say_when_empty(self) -> None:
        if self._emptied_due and not self.roster.requests:
            self._emptied_due = False
            self.roster.emit(ev.Emptied())

    def _say_how_it_is(self) -> None:
        health = self.alarm.reason(self.roster.now)
        if health != self._health_told:
            self._health_told = health
            self.roster.emit(ev.HealthChanged(health))

    # ---- the tables
    def _to_room(self, event: ev.RoomEvent) -> None:
        if isinstance(event, ev.RoomFailed | ev.RoomEnded):
            self.alarm.hear(event.room, event.failure, self.roster.now)
        request = self.roster.rooms.get(event.room)
        if request is None:
            self.roster.totals["late_messages"] += 1
            return
        handler = self.ROOM_HANDLERS.get((request.phase, type(event)))
        if handler is None:
            raise RuntimeError(f"no rule for {event} in {request}")
        handler(self, request, event)

    def _ignore(self, _request: Request, _event: Any) -> None:
        self.roster.totals["late_messages"] += 1

    HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ev.RequestArrived: _arrive,
        ev.CancelRequested: _cancel,
        ev.DrainAsked: _drain,
        ev.DecodeConnected: _connected,
        ev.DecodeLost: _decode_lost,
        ev.CapacityFreed: _capacity_freed,
        ev.ReserveAnswered: _to_room,
        ev.RoomInstalled: _to_room,
        ev.RoomEnded: _to_room,
        ev.RoomReady: _to_room,
        ev.RoomFailed: _to_room,
        ev.SourceReleased: _to_room,
        ev.Drained: _to_room,
        ev.StepDone: _step_done,
        ev.EngineFailed: _engine_failed,
        DeadlinePassed: _deadline,
    }
    ROOM_HANDLERS: ClassVar[dict[tuple[Phase, type], Callable[[Any, Request, Any], None]]] = {
        (Phase.RESERVING, ev.ReserveAnswered): _answered,
        (Phase.RESERVING, ev.RoomReady): _early_ready,
        (Phase.RESERVING, ev.RoomFailed): _room_failed,
        (Phase.BOOTSTRAPPING, ev.RoomReady): _rank_ready,
        **dict.fromkeys(product(BEFORE_HANDOFF, (ev.RoomFailed,)), _room_failed),
        **dict.fromkeys(product(BEFORE_HANDOFF, (ev.RoomEnded,)), _room_ended),
        (Phase.PREFILLING, ev.SourceReleased): _source_released,
        (Phase.PREFILLING, ev.RoomInstalled): _installed,
        (Phase.TRANSFERRING, ev.SourceReleased): _source_released,
        (Phase.TRANSFERRING, ev.RoomInstalled): _installed,
        (Phase.HANDED_OVER, ev.SourceReleased): _source_released,
        (Phase.HANDED_OVER, ev.RoomFailed): _room_failed,
        (Phase.RELEASING, ev.SourceReleased): _source_released,
        (Phase.RELEASING, ev.Drained): _drained,
        (Phase.RELEASING, ev.RoomEnded): _decode_is_rid,
        # what was on its way when the room was given up
        **dict.fromkeys(product((Phase.RELEASING,), (ev.RoomReady, ev.RoomFailed, ev.RoomInstalled)), _ignore),
        # an agent that its peer told to stop says so here before the decode scheduler's word comes, and once more when asked
        **dict.fromkeys(product((Phase.RESERVING, *BEFORE_HANDOFF, Phase.HANDED_OVER), (ev.Drained,)), _ignore),
    }
