"""Every request on this engine: where it stands in line, what it holds, and the ways out."""

from bisect import insort
from collections import Counter

import services.scheduler.prefill.events as ev
from services.contracts.ids import GlobalRank, RequestId, Room
from services.contracts.lifecycle import TERMINAL, State
from services.scheduler.prefill import report
from services.scheduler.prefill.admission import Limits
from services.scheduler.prefill.pool import Holding, Pool
from services.scheduler.prefill.request import (
    NO_ROOM,
    AnyState,
    Bootstrapping,
    HandedOver,
    Phase,
    Prefilling,
    Queued,
    Ready,
    Releasing,
    Request,
    Reserving,
    Timeline,
    Transferring,
    by_arrival,
)
from services.scheduler.prefill.timers import Timers

ENDS = {
    State.FINISHED: "requests_finished",
    State.FAILED: "requests_failed",
    State.CANCELLED: "requests_cancelled",
    State.INSTALLED: "requests_handed_over",
}

TOTALS = (
    *ENDS.values(), "requests_received", "requests_refused", "prompt_tokens", "steps", "late_messages",
    "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_hit_requests", "computed_tokens",
)  # fmt: skip
PINNED = {Phase.TRANSFERRING, Phase.HANDED_OVER, Phase.RELEASING}


class Roster:
    """The planner's data and its verbs. `now` is the time of the event under way, `effects` what it has led to so far."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.ranks = frozenset(map(GlobalRank, range(limits.ranks)))
        self.pool = Pool(limits.num_blocks, limits.num_slots)
        self.requests: dict[RequestId, Request] = {}
        self.rooms: dict[Room, Request] = {}
        self.phases: Counter[Phase] = Counter()
        self.queue: list[Request] = []  # QUEUED, by arrival
        self.ready: list[Request] = []  # READY, by arrival
        self.incomplete: list[Request] = []  # PREFILLING with prompt left, in the order in which they started
        self.wanting: set[Request] = set()  # gave their decode place back for want of blocks here, and have not started
        self.timers = Timers()
        self.totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self.now = 0.0
        self.effects: list[ev.Effect] = []

    # ---- places in line
    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._stand(request)

    def enter(self, request: Request, state: AnyState) -> None:
        self._step_aside(request)
        request.state = state
        self._stand(request)

    def queue_again(self, request: Request) -> None:
        """Back to its old place in the queue; the room is history."""
        self.rooms.pop(request.room, None)
        request.room = NO_ROOM
        self.enter(request, Queued())

    def _stand(self, request: Request) -> None:
        self.phases[request.phase] += 1
        match request.phase:
            case Phase.QUEUED:
                insort(self.queue, request, key=by_arrival)
            case Phase.READY:
                insort(self.ready, request, key=by_arrival)
            case Phase.PREFILLING:
                self.incomplete.append(request)
            case _:
                pass
        self.timers.arm(request)

    def _step_aside(self, request: Request) -> None:
        self.phases[request.phase] -= 1
        match request.state:
            case Queued():
                self.queue.remove(request)
            case Ready():
                self.ready.remove(request)
            case Prefilling(next=position) if position < request.prompt_tokens:
                self.incomplete.remove(request)
            case _:
                pass

    # ---- questions
    def lacks_blocks(self, request: Request) -> bool:
        """It cannot start: its blocks or its slot are not free, or an older prompt waits for some."""
        fits = self.pool.fits(self.limits.prompt_blocks(request.prompt_tokens), request.keys)
        return not fits or any(other.order < request.order for other in self.wanting)

    def counters(self) -> dict[str, int]:
        """What is going on now; all 0 when nothing is."""
        return {
            "queued": self.phases[Phase.QUEUED],
            "reserving": self.phases[Phase.RESERVING] + self.phases[Phase.BOOTSTRAPPING] + self.phases[Phase.READY],
            "running": self.phases[Phase.PREFILLING],
            "transferring": self.phases[Phase.TRANSFERRING] + self.phases[Phase.HANDED_OVER],
            "releasing": self.phases[Phase.RELEASING],
            "blocks_used": self.pool.cache.blocks_in_use,
            "slots_used": self.pool.cache.slots_in_use,
            "pins": sum(request.phase in PINNED and request.holding is not None for request in self.requests.values()),
        }

    # ---- the ways out
    def stop(self, request: Request, then: State, failure: ev.Failure, on_decode: bool = True) -> None:
        """End this attempt, wherever it is. `then` is FAILED, CANCELLED, or QUEUED: there will be another attempt.

        `on_decode`: D may hold something of the room.
        """
        if then in TERMINAL:
            self.tell(request, failure)
        match request.state:
            case Queued():
                self.end(request, then)
            case Reserving() as state if on_decode:  # only D's answer tells whether it holds a place
                state.then = state.then if state.then in TERMINAL else then
                self.timers.arm(request)
            case Reserving(then=before) if before in TERMINAL:
                self.release(request, before, on_decode)
            case Releasing() as state:
                state.then = state.then if state.then is not State.QUEUED else then
            case _:
                self.release(request, then, on_decode)

    def tell(self, request: Request, failure: ev.Failure) -> None:
        """The client's last word, unless it has had one."""
        if not request.told:
            request.told, request.failure = True, failure
            self.emit(ev.PublishFailure(request.request_id, failure))

    def release(self, request: Request, then: State, on_decode: bool = True) -> None:
        """Stop both engines' work on the room; what it holds stays held until they have said that they did."""
        holding, in_flight, undrained = None, 0, set(self.ranks)
        match request.state:
            case Prefilling() as state:
                holding, in_flight, undrained = state.holding, state.in_flight, state.unreleased
            case Transferring() | HandedOver() as state:
                holding, undrained = state.holding, state.unreleased
            case state:
                assert isinstance(state, Reserving | Bootstrapping | Ready), request
        if then not in (State.FINISHED, State.INSTALLED):
            self.write(request, State.RELEASING, report.ended(request))
        done_by = self.now + self.limits.drain_timeout
        self.enter(request, Releasing(holding, in_flight, undrained, on_decode, then, done_by))
        reason = "the first token was the last" if then is State.FINISHED else f"{request.request_id} becomes {then}"
        if on_decode:
            failure = request.failure if then is State.FAILED else None
            self.emit(ev.CancelOnDecode(request.room, reason, failure, finished_on_prefill=then is State.FINISHED))
        if undrained:
            self.emit(ev.CancelOnAgents(tuple(sorted(undrained)), request.room, reason))
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Give back what nobody can touch any more; go on when nothing of the room is left anywhere."""
        state = request.state
        assert isinstance(state, Releasing)
        if state.in_flight or state.undrained:
            return
        if state.holding is not None:
            self.give_back(request, state.holding)
            state.holding = None
        if state.on_decode:
            return
        if state.then is State.QUEUED:
            request.attempt += 1
            request.step = 0
            request.timeline = Timeline(self.now)
            self.queue_again(request)
            self.write(request, State.QUEUED, report.queued(request))
        else:
            self.end(request, state.then)

    def give_back(self, request: Request, holding: Holding) -> None:
        self.pool.give_back(holding)
        self.emit(ev.ForgetRooms((request.room,)))

    def end(self, request: Request, state: State) -> None:
        """Nothing of it is left here. INSTALLED: it lives on at D."""
        self._step_aside(request)
        self.rooms.pop(request.room, None)
        self.wanting.discard(request)
        del self.requests[request.request_id]
        self.timers.disarm(request)
        self.totals[ENDS[state]] += 1
        if state is State.INSTALLED:
            self.write(request, State.TRANSFERRING, report.released(request, self.now), request.decode)
        elif state is not State.FINISHED:  # that was written when it happened
            self.write(request, state, report.ended(request))
        self.emit(ev.RequestGone(request.request_id))

    # ---- loss
    def lose_decode(self, failure: ev.Failure) -> None:
        """Nobody on D goes on: neither with what is not installed there, nor with what is, whose client D had to tell."""
        for request in list(self.requests.values()):
            if request.is_handed_over:
                request.failure = failure
            match request.state:
                case Releasing() as state:
                    if not request.told:
                        self.stop(request, State.FAILED, failure)
                    state.on_decode = False
                    state.then = State.FAILED if state.then is State.INSTALLED else state.then
                    self.settle(request)
                case _ if request.is_handed_over:
                    self.release(request, State.FAILED, on_decode=False)
                case _:
                    self.stop(request, State.FAILED, failure, on_decode=False)

    def lose_engine(self, failure: ev.Failure) -> None:
        """End every request at once: the memory is gone with the engine."""
        for request in list(self.requests.values()):
            if (holding := request.holding) is not None:
                self.pool.give_back(holding)
            self.end(request, self._fate(request, failure))

    def _fate(self, request: Request, failure: ev.Failure) -> State:
        """What becomes of a request whose engine is lost: what had been decided before, else it fails."""
        if request.is_handed_over:
            return State.INSTALLED
        match request.state:
            case Reserving(then=then) | Releasing(then=then) if then in TERMINAL:
                return then
            case _:
                self.tell(request, failure)
                return State.FAILED

    # ---- effects
    def write(self, request: Request, state: State, fields: report.Fields, owner: str = "") -> None:
        step = request.next_step(state)
        self.emit(ev.WriteTransition(request.request_id, state, request.attempt, step, fields, owner))

    def emit(self, *effects: ev.Effect) -> None:
        self.effects += effects
