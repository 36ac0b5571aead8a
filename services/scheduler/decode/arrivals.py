"""From a reservation to the installation, or to the end of a room that never got there (spec cache-and-handoff §9-§11)."""

import services.scheduler.decode.events as ev
from services.contracts.lifecycle import State
from services.scheduler.decode import report
from services.scheduler.decode.acceptance import Guesses
from services.scheduler.decode.admission import admit, budget, manifest, refusal
from services.scheduler.decode.capacity import GROWTH_TOKENS
from services.scheduler.decode.request import (
    Installed,
    Progress,
    Receiving,
    Releasing,
    Request,
    Reserved,
    stop_tokens,
)
from services.scheduler.decode.rooms import Rooms

ATTACH_S = 30.0  # a client opens its stream within this of the reservation, or the request is cancelled
DRAIN_S = 120.0  # agents answer Drained within this, or the engine is lost: nothing else frees what they may write to


class Arrivals:
    """Handlers of rooms that are RESERVED, RECEIVING or RELEASING."""

    def __init__(self, rooms: Rooms):
        self._rooms = rooms
        self._shape = rooms.shape
        self._installs = 0

    # ---- reservation
    def reserve(self, asked: ev.ReserveAsked, draining: bool) -> bool:
        """Answer a reservation -> whether it must wait for capacity."""
        rooms, shape = self._rooms, self._shape
        failure = self._refusal(asked, draining)
        holding = None if failure else admit(asked, shape, rooms.pools, rooms.requests.values())
        if holding is None:
            rooms.emit(ev.AnswerReserve(asked.pair, asked.room, accepted=False, failure=failure))
            return failure is None
        timeout = asked.timeout or shape.request_timeout
        request = rooms.requests[asked.room] = Request(
            asked=asked,
            budget=budget(asked, shape),
            covered=budget(asked, shape) - 1 <= GROWTH_TOKENS,
            stops=stop_tokens(asked, shape.end_tokens),
            reserved_at=rooms.now,
            deadline=rooms.now + timeout,
            attach_by=rooms.now + ATTACH_S,
            proposals=rooms.widths.worth_drafting(holding.replica),
            state=Reserved(holding),
        )
        rooms.write(request, State.RESERVED, report.reserved(request, shape, holding))
        wanted = manifest(asked, shape, rooms.pools[holding.replica], holding, timeout)
        rooms.emit(ev.ExpectManifest(shape.ranks_of(holding.replica), wanted))
        rooms.totals["prefix_cache_queries"] += asked.prompt_tokens
        rooms.totals["prefix_cache_hits"] += wanted.prefix_tokens
        answer = ev.AnswerReserve(
            asked.pair,
            asked.room,
            accepted=True,
            replica=holding.replica,
            proposals=request.proposals,
            prefix_tokens=wanted.prefix_tokens,
        )
        rooms.emit(answer)
        return False

    def _refusal(self, asked: ev.ReserveAsked, draining: bool) -> ev.Failure | None:
        if draining:
            return ev.Failure("engine_lost", f"decode engine {self._shape.engine_id} is draining; try again later")
        if asked.room in self._rooms.requests or asked.room in self._rooms.tombstones:
            return ev.Failure("transfer_failed", f"room {asked.room} was used before; draw a new one", "PD_MANIFEST")
        return refusal(asked, self._shape)

    # ---- transfer
    def rank_ready(self, request: Request, ready: ev.AgentRankReady) -> None:
        state = request.state
        assert isinstance(state, Reserved | Receiving)
        room, replica = request.room, state.holding.replica
        if ready.attempt != request.asked.attempt:
            self._rooms.ignore(request, ready)
            return
        if ready.rank not in self._shape.ranks_of(replica):
            self._fail(request, "PD_ROUTE", f"rank {ready.rank} reports room {room} of replica {replica}")
            return
        if isinstance(state, Reserved):
            request.state = state = Receiving(state.holding, {}, self._rooms.now)
        if state.arrivals.setdefault(ready.rank, ready) != ready:
            self._fail(request, "PD_ROUTE", f"rank {ready.rank} reports room {room} twice, with different contents")
            return
        state.progressed_at = self._rooms.now
        self.install_when_whole(request)

    def install_when_whole(self, request: Request) -> None:
        """All or nothing: every rank has its shard, and the client's stream is here. Until then its stream to the prefill
        scheduler stays open, so that one of the two notices whenever it leaves."""
        state = request.state
        if not isinstance(state, Receiving) or len(state.arrivals) < self._shape.tp_size:
            return
        windows = sorted({(ready.token, ready.window) for ready in state.arrivals.values()})
        token, window = windows[0]
        width = self._shape.verify_width
        if len(windows) > 1 or len(window) != width or window[0] != token:
            reason = f"room {request.room}: all ranks must report one window of {width} that begins with the first token"
            self._fail(request, "PD_CAND", f"{reason}; they report {windows}")
            return
        if request.ends_with(token):
            return  # the prefill scheduler ends the request and cancels the room; no token of it comes from here
        if not request.attached:
            return
        self._installs += 1
        pool = self._rooms.pools[state.holding.replica]
        if self._shape.keys is not None:
            for key in request.asked.keys[len(state.holding.cached) :]:
                pool.final(state.holding, key)
        progress = Progress(
            order=self._installs,
            position=request.asked.prompt_tokens,
            window=window,
            usable=1 + request.proposals,
            cached_tokens=max(ready.cached_tokens for ready in state.arrivals.values()),
            installed_at=self._rooms.now,
            last_token_at=self._rooms.now,
            guesses=Guesses(window[1 : 1 + request.proposals]),
            unnamed=[*request.asked.tail, token] if request.asked.tail else [],
        )
        request.state = Installed(state.holding, progress)
        self._rooms.seat(request)
        self._rooms.joined.add(state.holding.replica)
        self._rooms.write(request, State.INSTALLED, report.installed(request, state, self._rooms.now))
        self._rooms.emit(ev.RoomInstalled(request.asked.pair, request.room))
        self._rooms.publish([(request, (token,))])

    def rank_failed(self, request: Request, event: ev.AgentRoomFailed) -> None:
        if event.attempt != request.asked.attempt:
            self._rooms.ignore(request, event)
        else:
            self._release(request, event.failure)

    def drained_unasked(self, request: Request, event: ev.AgentDrained) -> None:
        self._fail(request, "PD_TRANSFER", f"rank {event.rank} let go of room {request.room} without being asked to")

    def _fail(self, request: Request, detail: str, message: str) -> None:
        self._release(request, ev.Failure("transfer_failed", message, detail))

    # ---- the end of a room that is not installed
    def end(self, request: Request, event: ev.EndAsked) -> None:
        self._release(request, event.failure)

    def _release(self, request: Request, failure: ev.Failure | None) -> None:
        """Its memory stays until all agents are out of it. Without a failure it was cancelled."""
        state = request.state
        assert isinstance(state, Reserved | Receiving)
        ranks = self._shape.ranks_of(state.holding.replica)
        request.state = Releasing(state.holding, set(ranks), failure, self._rooms.now + DRAIN_S)
        self._rooms.emit(ev.CancelOnAgents(ranks, request.room, failure.message if failure else "cancelled"))
        self._rooms.end(request, failure if failure and request.orphaned else ev.ToldByPrefill())

    def drained(self, request: Request, event: ev.AgentDrained) -> None:
        state = request.state
        assert isinstance(state, Releasing)
        state.waiting.discard(event.rank)
        if not state.waiting:
            self._leave(request, state, state.failure)

    def lose(self, request: Request, failure: ev.Failure) -> None:
        """The engine is gone and its agents with it: nobody is left to wait for."""
        state = request.state
        assert isinstance(state, Reserved | Receiving | Releasing)
        if not isinstance(state, Releasing):
            self._rooms.end(request, ev.ToldByPrefill())
        self._leave(request, state, failure)

    def _leave(self, request: Request, state: Reserved | Receiving | Releasing, failure: ev.Failure | None) -> None:
        """The prefill scheduler notes the end, if it is still there."""
        rooms = self._rooms
        rooms.give_back(state.holding)
        rooms.totals["requests_cancelled" if failure is None or failure.code == "cancelled" else "requests_failed"] += 1
        if not request.orphaned:
            rooms.emit(ev.RoomEnded(request.asked.pair, request.room, failure))
        elif failure is not None:
            rooms.write(request, State.FAILED, report.failed(failure))
        else:
            rooms.write(request, State.CANCELLED)
        rooms.forget(request)
