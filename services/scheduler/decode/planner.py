"""The decode scheduler's decisions: who gets a place, what the next round runs, when a request ends and is let go of
(spec scheduling §3, §4, §6). The states and their picture are in request.py, what happens in them in arrivals.py,
residents.py and suspended.py; here are the doors, the table, and what concerns the engine as a whole."""

from collections.abc import Callable
from itertools import product
from math import inf
from typing import Any

import services.scheduler.decode.events as ev
from services.contracts.events import DeadlinePassed
from services.contracts.ids import RequestId
from services.scheduler.alarm import Alarm
from services.scheduler.decode.arrivals import DRAIN_S, Arrivals
from services.scheduler.decode.request import (
    Phase,
    Receiving,
    Releasing,
    Request,
    Reserved,
    Restoring,
    Retracted,
    Retracting,
)
from services.scheduler.decode.residents import Residents
from services.scheduler.decode.rooms import Rooms
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.suspended import Suspensions

ROUND_S = 120.0  # the workers answer a round within this, or the engine is lost

Handler = Callable[[Any], None]
RoomHandler = Callable[[Request, Any], None]


class DecodePlanner:
    """One decode engine. `apply` and `plan` change it, the rest asks; times are seconds of one clock."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.pairs: dict[ev.Pair, str] = {}  # the prefill engines that may ask, by name
        self.draining = False
        self.alarm = Alarm()
        self._rooms = Rooms(shape)
        self._arrivals = Arrivals(self._rooms)
        self._suspensions = Suspensions(self._rooms)
        self._residents = Residents(self._rooms, self._suspensions)
        self._refused: dict[ev.Pair, None] = {}  # who waits for capacity, in the order of asking
        self._emptied_due = False
        self._due: float | None = inf  # no request's is sooner; None: to be looked for among all of them
        self._lost = False
        self._handlers = self._table_of_events()
        self._room_handlers = self._table_of_states()

    # ---- the two doors
    def apply(self, event: object, now: float) -> list[ev.Effect]:
        """Something happened -> what must be done, in this order."""
        self._rooms.now, self._rooms.effects = now, []
        if not self._lost:
            self._handlers[type(event)](event)
            self._residents.secure_next_rows()
            self._suspensions.restore()
            self._tell_who_waits()
        return self._rooms.effects

    def plan(self, now: float) -> ev.RoundPlan | None:
        """The next round, also while one runs; None while one waits behind that, or when there is nothing to do."""
        return None if self._lost else self._residents.plan(now)

    # ---- questions
    def next_deadline(self) -> float | None:
        """When DeadlinePassed is due if nothing happens before; there may be nothing to do then, if what was due went well."""
        rooms = self._rooms
        if self._due is None:
            self._due = min(map(rooms.due, rooms.requests.values()), default=inf)
        of_round = rooms.round_since + ROUND_S if rooms.rounds else inf
        due = min(self._due if rooms.requests else inf, of_round)
        return None if due == inf else due

    @property
    def requests(self) -> int:
        """How many are here."""
        return len(self._rooms.requests)

    def knows(self, request_id: RequestId) -> bool:
        return any(request.asked.request_id == request_id for request in self._rooms.requests.values())

    @property
    def totals(self) -> dict[str, int]:
        """Counts since the start."""
        return self._rooms.totals | {"prefix_cache_evictions": sum(pool.cache.blocks_evicted for pool in self._rooms.pools)}

    def counters(self) -> dict[str, int]:
        """What is held now; all of it is zero when nobody is here."""
        return self._rooms.counters()

    def cache(self) -> dict[str, int]:
        """What the prefix caches have; it stays when nobody is here."""
        return {"cached_blocks": sum(pool.cache.cached_blocks for pool in self._rooms.pools)}

    def check(self) -> None:
        """Every invariant; raises AssertionError."""
        self._rooms.check()
        soonest = min(map(self._rooms.due, self._rooms.requests.values()), default=inf)
        assert self._due is None or self._due <= soonest, "a request's time is up sooner than anybody knows"

    # ---- prefill engines
    def _paired(self, event: ev.PrefillPaired) -> None:
        self.pairs[event.pair] = event.engine_id

    def _reserve(self, asked: ev.ReserveAsked) -> None:
        if asked.pair not in self.pairs:
            self._rooms.totals["late_messages"] += 1
        elif self._arrivals.reserve(asked, self.draining):
            self._rooms.totals["reservations_refused"] += 1
            self._refused[asked.pair] = None
        elif (request := self._rooms.requests.get(asked.room)) is not None:
            self._expect(request)

    def _cancel_room(self, event: ev.CancelRoom) -> None:
        rooms = self._rooms
        request = rooms.requests.get(event.room)
        if request is None:
            if event.room not in rooms.tombstones:  # a Reserve that comes after its own cancel must not start
                rooms.tombstones.bury(event.room, ev.ToldByPrefill())
            rooms.emit(ev.RoomEnded(event.pair, event.room, None))
            return
        request.awaited = True
        self._end(request, event.failure)

    def _prefill_lost(self, event: ev.PrefillLost) -> None:
        engine = self.pairs.pop(event.pair, None)
        self._refused.pop(event.pair, None)
        for request in [r for r in self._rooms if r.asked.pair == event.pair]:
            request.awaited = False
            request.orphaned = isinstance(request.state, Reserved | Receiving | Releasing)
            if isinstance(request.state, Reserved | Receiving | Releasing):
                message = f"prefill engine {engine} was lost before its request was handed over ({event.reason}); try again"
                self._end(request, ev.Failure("engine_lost", message))

    # ---- clients
    def _attach(self, event: ev.ClientAttached) -> None:
        request = self._rooms.attach(event)
        if request is not None:
            self._arrivals.install_when_whole(request)

    def _client_gone(self, event: ev.ClientGone) -> None:
        request = self._rooms.detach(event.client)
        if request is not None:
            self._end(request, None)

    def _cancel_request(self, event: ev.CancelRequested) -> None:
        for request in [r for r in self._rooms if r.asked.request_id == event.request_id]:
            self._end(request, None)

    # ---- the engine
    def _round_done(self, done: ev.RoundDone) -> None:
        problem = self._residents.round_done(done)
        if problem is not None:
            self._lose(ev.Failure("internal", f"decode engine {self.shape.engine_id}: {problem}"))

    def _deadline(self, _: DeadlinePassed) -> None:
        self._due = None
        now, rounds = self._rooms.now, self._rooms.rounds
        if rounds and now >= self._rooms.round_since + ROUND_S:
            self._lose_for(f"round {rounds[0].round_id} was not answered within {ROUND_S:g} s")
            return
        for request in [r for r in self._rooms if now >= self._rooms.due(r)]:
            match request.state:
                case Releasing(waiting=ranks):
                    silent = f"agents of ranks {sorted(ranks)}"
                    self._lose_for(f"{silent} did not let go of room {request.room} within {DRAIN_S:g} s")
                    return
                case _:
                    self._end(request, request.overdue(now))

    def _engine_failed(self, event: ev.EngineFailed) -> None:
        self._lose(event.failure)

    def _drain(self, _: ev.DrainAsked) -> None:
        self.draining = self._emptied_due = True

    def _lose_for(self, reason: str) -> None:
        self._lose(ev.Failure("engine_lost", f"decode engine {self.shape.engine_id}: {reason}"))

    def _lose(self, failure: ev.Failure) -> None:
        """Fail everyone and stop for good."""
        self._rooms.rounds.clear()
        for request in self._rooms:
            match request.state:
                case Reserved() | Receiving() | Releasing():
                    self._arrivals.lose(request, failure)
                case Retracting() | Retracted() | Restoring():
                    self._suspensions.lose(request, failure)
                case _:
                    self._residents.lose(request, failure)
        self._rooms.requests.clear()
        self._rooms.clients.clear()
        self._refused.clear()
        self._lost = True
        self._rooms.emit(ev.LoseEngine(failure))

    def _tell_who_waits(self) -> None:
        if self._rooms.capacity_freed:
            self._rooms.effects += [ev.CapacityFreed(pair) for pair in self._refused]
            self._refused.clear()
        self._rooms.capacity_freed = False
        if self._emptied_due and not self._rooms.requests:
            self._emptied_due = False
            self._rooms.emit(ev.Emptied())

    # ---- the tables
    def _end(self, request: Request, failure: ev.Failure | None) -> None:
        """End a request that goes on, wherever it is; None: it was cancelled."""
        self._dispatch(request, ev.EndAsked(failure))

    def _from_agent(self, event: ev.AgentRankReady | ev.AgentRoomFailed | ev.AgentDrained) -> None:
        if isinstance(event, ev.AgentRoomFailed):
            self.alarm.hear(event.room, event.failure, self._rooms.now)
        request = self._rooms.requests.get(event.room)
        if request is None:
            self._rooms.totals["late_messages"] += 1
        else:
            self._dispatch(request, event)

    def _dispatch(self, request: Request, event: object) -> None:
        handler = self._room_handlers.get((request.state.phase, type(event)))
        if handler is None:
            raise RuntimeError(f"no rule for {event} in {request}")
        handler(request, event)
        self._expect(request)

    def _expect(self, request: Request) -> None:
        """Its time is up sooner than it was, perhaps."""
        if self._due is not None:
            self._due = min(self._due, self._rooms.due(request))

    def _table_of_events(self) -> dict[type, Handler]:
        return {
            ev.PrefillPaired: self._paired,
            ev.ReserveAsked: self._reserve,
            ev.CancelRoom: self._cancel_room,
            ev.PrefillLost: self._prefill_lost,
            ev.AgentRankReady: self._from_agent,
            ev.AgentRoomFailed: self._from_agent,
            ev.AgentDrained: self._from_agent,
            ev.ClientAttached: self._attach,
            ev.ClientGone: self._client_gone,
            ev.CancelRequested: self._cancel_request,
            ev.RoundDone: self._round_done,
            ev.DrainAsked: self._drain,
            ev.EngineFailed: self._engine_failed,
            DeadlinePassed: self._deadline,
        }

    def _table_of_states(self) -> dict[tuple[Phase, type], RoomHandler]:
        arrivals, residents, ignore = self._arrivals, self._residents, self._rooms.ignore
        suspended = (Phase.RETRACTING, Phase.RETRACTED, Phase.RESTORING)
        return {
            (Phase.RESERVED, ev.AgentRankReady): arrivals.rank_ready,
            (Phase.RESERVED, ev.AgentRoomFailed): arrivals.rank_failed,
            (Phase.RESERVED, ev.AgentDrained): arrivals.drained_unasked,
            (Phase.RESERVED, ev.EndAsked): arrivals.end,
            (Phase.RECEIVING, ev.AgentRankReady): arrivals.rank_ready,
            (Phase.RECEIVING, ev.AgentRoomFailed): arrivals.rank_failed,
            (Phase.RECEIVING, ev.AgentDrained): arrivals.drained_unasked,
            (Phase.RECEIVING, ev.EndAsked): arrivals.end,
            (Phase.RELEASING, ev.AgentDrained): arrivals.drained,
            (Phase.RELEASING, ev.AgentRankReady): ignore,
            (Phase.RELEASING, ev.AgentRoomFailed): ignore,
            (Phase.RELEASING, ev.EndAsked): _ends_already,
            (Phase.INSTALLED, ev.EndAsked): residents.end,
            (Phase.DECODING, ev.EndAsked): residents.end,
            **dict.fromkeys(product(suspended, (ev.EndAsked,)), self._suspensions.end),
            (Phase.FINISHING, ev.EndAsked): _ends_already,
            # an installed request needs its agents no more
            **dict.fromkeys(
                product(
                    (Phase.INSTALLED, Phase.DECODING, *suspended, Phase.FINISHING),
                    (ev.AgentRankReady, ev.AgentRoomFailed, ev.AgentDrained),
                ),
                ignore,
            ),
        }


def _ends_already(_request: Request, _event: ev.EndAsked) -> None:
    """Ending is idempotent."""
