"""The decode scheduler's decisions: who gets a place, what the next round runs, when a request ends and is let go of
(spec scheduling §3, §4, §6; cache-and-handoff §9-§11). The states and their picture are in request.py."""

from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import services.scheduler.decode.events as ev
from services.contracts.events import DeadlinePassed
from services.contracts.geometry import blocks_for
from services.contracts.ids import RequestId
from services.contracts.lifecycle import State
from services.scheduler.decode import report
from services.scheduler.decode.admission import admit, budget, manifest, refusal
from services.scheduler.decode.capacity import Holding, Pool
from services.scheduler.decode.request import (
    Decoding,
    Finishing,
    Installed,
    Lingering,
    Phase,
    Progress,
    Receiving,
    Releasing,
    Request,
    Reserved,
    stop_tokens,
)
from services.scheduler.decode.rooms import Rooms
from services.scheduler.decode.rounds import launch, mismatch
from services.scheduler.decode.shape import EngineShape

ATTACH_S = 30.0  # a client opens its stream within this of the reservation, or the request is cancelled
DRAIN_S = 120.0  # agents answer Drained within this, or the engine is lost: nothing else frees what they may write to
ROUND_S = 120.0  # the workers answer a round within this, or the engine is lost


class DecodePlanner:
    """One decode engine. `apply` and `plan` change it, the rest asks; times are seconds of one clock."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.pairs: dict[ev.Pair, str] = {}  # the prefill engines that may ask, by name
        self.draining = False
        self._rooms = Rooms(shape)
        self._refused: dict[ev.Pair, None] = {}  # who waits for capacity, in the order of asking
        self._rounds_launched = 0
        self._installs = 0
        self._emptied_due = False
        self._lost = False
        self._now = 0.0

    # ---- the two doors
    def apply(self, event: object, now: float) -> list[ev.Effect]:
        """Something happened -> what must be done, in this order."""
        self._now, self._rooms.effects = now, []
        if not self._lost:
            self.HANDLERS[type(event)](self, event)
            self._secure_next_rows()
            self._tell_who_waits()
        return self._rooms.effects

    def plan(self, now: float) -> ev.RoundPlan | None:
        """The next round, or None while one is out or when nobody lives."""
        if self._rooms.round is not None or self._lost:
            return None
        launched = launch(self._rounds_launched + 1, self.shape, self._rooms.pools, self._rooms.residents, now)
        if launched is None:
            return None
        self._rounds_launched += 1
        plan, self._rooms.round = launched
        return plan

    # ---- questions
    def next_deadline(self) -> float | None:
        """When DeadlinePassed is due if nothing happens before."""
        times = [self._rooms.due(request) for request in self._rooms.requests.values()]
        if self._rooms.round is not None:
            times.append(self._rooms.round.launched_at + ROUND_S)
        return min(times, default=None)

    @property
    def requests(self) -> int:
        """How many are here, those that linger included."""
        return len(self._rooms.requests)

    def knows(self, request_id: RequestId) -> bool:
        return any(request.asked.request_id == request_id for request in self._rooms.requests.values())

    @property
    def totals(self) -> dict[str, int]:
        """Counts since the start."""
        return self._rooms.totals

    def counters(self) -> dict[str, int]:
        """What is held now; all of it is zero when nobody is here."""
        return self._rooms.counters()

    def check(self) -> None:
        """Every invariant; raises AssertionError."""
        self._rooms.check()

    # ---- reservation
    def _paired(self, event: ev.PrefillPaired) -> None:
        self.pairs[event.pair] = event.engine_id

    def _reserve(self, asked: ev.ReserveAsked) -> None:
        if asked.pair not in self.pairs:
            self._rooms.totals["late_messages"] += 1
            return
        failure = self._refusal(asked)
        holding = None if failure else admit(asked, self.shape, self._rooms.pools, self._rooms.requests.values())
        if holding is None:
            if failure is None:
                self._rooms.totals["reservations_refused"] += 1
                self._refused[asked.pair] = None
            self._rooms.emit(ev.AnswerReserve(asked.pair, asked.room, accepted=False, failure=failure))
            return
        timeout = asked.timeout or self.shape.request_timeout
        request = self._rooms.requests[asked.room] = Request(
            asked=asked,
            budget=budget(asked, self.shape),
            stops=stop_tokens(asked, self.shape.end_tokens),
            reserved_at=self._now,
            deadline=self._now + timeout,
            attach_by=self._now + ATTACH_S,
            state=Reserved(holding),
        )
        self._rooms.write(request, State.RESERVED, report.reserved(request, self.shape, holding))
        wanted = manifest(asked, self.shape, self._rooms.pools[holding.replica], holding, timeout)
        self._rooms.emit(ev.ExpectManifest(self.shape.ranks_of(holding.replica), wanted))
        self._rooms.emit(ev.AnswerReserve(asked.pair, asked.room, accepted=True, replica=holding.replica))

    def _refusal(self, asked: ev.ReserveAsked) -> ev.Failure | None:
        if self.draining:
            return ev.Failure("engine_lost", f"decode engine {self.shape.engine_id} is draining; try again later")
        if asked.room in self._rooms.requests or asked.room in self._rooms.tombstones:
            return ev.Failure("transfer_failed", f"room {asked.room} was used before; draw a new one", "PD_MANIFEST")
        return refusal(asked, self.shape)

    # ---- the transfer
    def _arrive(self, request: Request, ready: ev.AgentRankReady) -> None:
        state = request.state
        assert isinstance(state, Reserved | Receiving)
        room, replica = request.room, state.holding.replica
        if ready.attempt != request.asked.attempt:
            self._ignore(request, ready)
            return
        if ready.rank not in self.shape.ranks_of(replica):
            self._fail_transfer(request, "PD_ROUTE", f"rank {ready.rank} reports room {room} of replica {replica}")
            return
        if isinstance(state, Reserved):
            request.state = state = Receiving(state.holding, {}, self._now)
        if state.arrivals.setdefault(ready.rank, ready) != ready:
            self._fail_transfer(request, "PD_ROUTE", f"rank {ready.rank} reports room {room} twice, with different contents")
            return
        state.progressed_at = self._now
        if len(state.arrivals) == self.shape.tp_size:
            self._complete(request, state)

    def _complete(self, request: Request, state: Receiving) -> None:
        """Every rank has its shard: install, all or nothing."""
        windows = sorted({(ready.token, ready.window) for ready in state.arrivals.values()})
        token, window = windows[0]
        width = self.shape.verify_width
        if len(windows) > 1 or len(window) != width or window[0] != token:
            reason = f"room {request.room}: all ranks must report one window of {width} that begins with the first token"
            self._fail_transfer(request, "PD_CAND", f"{reason}; they report {windows}")
            return
        if request.ends_with(token):
            return  # the prefill scheduler ends the request and cancels the room; no token of it comes from here
        self._installs += 1
        progress = Progress(
            order=self._installs,
            position=request.asked.prompt_tokens,
            window=window,
            cached_tokens=max(ready.cached_tokens for ready in state.arrivals.values()),
            installed_at=self._now,
            last_token_at=self._now,
        )
        request.state = Installed(state.holding, progress)
        self._rooms.residents[state.holding.replica][request.room] = request
        self._rooms.write(request, State.INSTALLED, report.installed(request, state, self._now))
        self._rooms.emit(ev.RoomInstalled(request.asked.pair, request.room))
        self._rooms.publish(request, (token,))

    def _room_failed(self, request: Request, event: ev.AgentRoomFailed) -> None:
        if event.attempt == request.asked.attempt:
            self._release(request, event.failure)

    def _drained_unasked(self, request: Request, event: ev.AgentDrained) -> None:
        self._fail_transfer(request, "PD_TRANSFER", f"rank {event.rank} let go of room {request.room} without being asked to")

    def _fail_transfer(self, request: Request, detail: str, message: str) -> None:
        self._release(request, ev.Failure("transfer_failed", message, detail))

    # ---- the end of a room that is not installed
    def _release(self, request: Request, failure: ev.Failure | None) -> None:
        """Its memory stays until all agents are out of it. Without a failure it was cancelled."""
        state = request.state
        assert isinstance(state, Reserved | Receiving)
        ranks = self.shape.ranks_of(state.holding.replica)
        request.state = Releasing(state.holding, set(ranks), failure, self._now + DRAIN_S)
        self._rooms.emit(ev.CancelOnAgents(ranks, request.room, failure.message if failure else "cancelled"))
        self._rooms.end(request, failure if failure and request.orphaned else ev.ToldByPrefill())

    def _drained(self, request: Request, event: ev.AgentDrained) -> None:
        state = request.state
        assert isinstance(state, Releasing)
        state.waiting.discard(event.rank)
        if not state.waiting:
            self._rooms.give_back(state.holding)
            self._leave_unheard(request, state.failure)

    def _leave_unheard(self, request: Request, failure: ev.Failure | None) -> None:
        """The prefill scheduler notes the end of a room that was never installed, if it is still there."""
        self._rooms.totals["requests_cancelled" if failure is None or failure.code == "cancelled" else "requests_failed"] += 1
        if not request.orphaned:
            self._rooms.emit(ev.RoomEnded(request.asked.pair, request.room, failure))
        elif failure is not None:
            self._rooms.write(request, State.FAILED, report.failed(failure))
        else:
            self._rooms.write(request, State.CANCELLED)
        self._rooms.forget(request)

    # ---- rounds
    def _secure_next_rows(self) -> None:
        """Give every resident the blocks of its next round; the oldest first, at the cost of the newest."""
        if self._rooms.round is not None:
            return  # nobody may be aborted now, and nobody's position is known
        for pool, residents in zip(self._rooms.pools, self._rooms.residents, strict=True):
            for room in list(residents):
                while (request := residents.get(room)) is not None and not self._grow(pool, request):
                    self._abort(pool, residents[next(reversed(residents))])

    def _grow(self, pool: Pool, request: Request) -> bool:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        return pool.grow(state.holding, blocks_for(state.progress.position + self.shape.rows_ahead))

    def _abort(self, pool: Pool, newest: Request) -> None:
        self._rooms.totals["capacity_aborts"] += 1
        message = (
            f"decode replica {pool.replica} has no free block left of {pool.blocks.capacity}, and this request is the newest "
            "of those that grow there; try again, or give the decode engine more blocks or a lower --max-num-seqs"
        )
        self._finish(newest, ev.Failure("capacity_aborted", message))

    def _round_done(self, done: ev.RoundDone) -> None:
        launched, problem = self._rooms.round, mismatch(self._rooms.round, done, self.shape.verify_width)
        if problem is not None or launched is None:
            self._lose(ev.Failure("internal", f"decode engine {self.shape.engine_id}: {problem}"))
            return
        self._rooms.round = None
        self._rooms.totals["rounds"] += 1
        for rows, entries in zip(launched.rows, done.replicas, strict=True):
            for (_, room), entry in zip(rows, entries, strict=True):
                request = self._rooms.requests[room]
                match request.state:
                    case Decoding(progress=progress):
                        self._advance(request, progress, entry)
                    case Finishing(holding=holding, progress=progress):
                        self._leave(request, holding, progress)
                    case state:
                        raise RuntimeError(f"room {room} was in round {done.round_id} and is {state.phase.name} now")

    def _advance(self, request: Request, progress: Progress, entry: ev.PlaceTokens) -> None:
        if progress.rounds == 0:
            self._rooms.write(request, State.DECODING)
        self._count_acceptance(progress, len(entry.tokens) - 1)
        progress.rounds += 1
        tokens, end = request.accept(progress, entry.tokens)
        progress.position += len(entry.tokens)
        progress.window = entry.window
        progress.last_token_at = self._now
        self._rooms.publish(request, tokens)
        if end is not None:
            self._finish(request, end)

    def _count_acceptance(self, progress: Progress, right: int) -> None:
        """`right` proposals of a window were, whether or not the request ends before the last of them."""
        drafted, totals = self.shape.verify_width - 1, self._rooms.totals
        if not drafted:
            return
        progress.drafted += drafted
        progress.accepted += right
        totals["tokens_drafted"] += drafted
        totals["tokens_accepted"] += right
        totals["windows"] += 1
        for k in range(1, right + 1):
            totals[f"accepted_at_{k}"] += 1
        if progress.rounds == 0:
            totals["handoff_windows"] += 1
            totals["handoff_accepted"] += right

    # ---- the end of an installed request
    def _finish(self, request: Request, end: ev.Finished | ev.Failure) -> None:
        """No new rounds; what it holds stays while a launched round may write to it."""
        state = request.state
        assert isinstance(state, Installed | Decoding)
        del self._rooms.residents[state.holding.replica][request.room]
        self._rooms.write(request, State.FINISHING)
        self._rooms.end(request, end)
        if isinstance(state, Decoding):
            self._rooms.pools[state.holding.replica].clears.add(state.holding.place)
            if self._rooms.round is not None and state.round_id == self._rooms.round.round_id:
                request.state = Finishing(state.holding, state.progress, state.round_id)
                return
        self._leave(request, state.holding, state.progress)

    def _leave(self, request: Request, holding: Holding, progress: Progress) -> None:
        self._rooms.give_back(holding)
        end = request.end
        assert isinstance(end, ev.Finished | ev.Failure)
        state, fields = report.ended(end, progress)
        self._rooms.write(request, state, fields)
        kinds = {State.FINISHED: "requests_finished", State.CANCELLED: "requests_cancelled"}
        self._rooms.totals[kinds.get(state, "requests_failed")] += 1
        if request.awaited:
            self._rooms.emit(ev.RoomEnded(request.asked.pair, request.room, end if isinstance(end, ev.Failure) else None))
        if request.attached or self._now >= request.attach_by:
            self._rooms.forget(request)
        else:
            request.state = Lingering()

    # ---- cancellation
    def _end_now(self, request: Request, failure: ev.Failure | None) -> None:
        """End a request that goes on, wherever it is; None: it was cancelled."""
        self._dispatch(request, ev.EndAsked(failure))

    def _end_waiting(self, request: Request, event: ev.EndAsked) -> None:
        self._release(request, event.failure)

    def _end_resident(self, request: Request, event: ev.EndAsked) -> None:
        self._finish(request, event.failure or ev.Failure("cancelled", f"{request.asked.request_id} was cancelled"))

    def _cancel_room(self, event: ev.CancelRoom) -> None:
        request = self._rooms.requests.get(event.room)
        if request is None:
            if event.room not in self._rooms.tombstones:  # a Reserve that comes after its own cancel must not start
                self._rooms.tombstones.bury(event.room, ev.ToldByPrefill())
            self._rooms.emit(ev.RoomEnded(event.pair, event.room, None))
            return
        if isinstance(request.state, Lingering):
            self._rooms.emit(ev.RoomEnded(event.pair, event.room, None))
        request.awaited = True
        self._end_now(request, event.failure)

    def _cancel_request(self, event: ev.CancelRequested) -> None:
        for request in [r for r in self._rooms if r.asked.request_id == event.request_id]:
            self._end_now(request, None)

    # ---- clients
    def _attach(self, event: ev.ClientAttached) -> None:
        self._rooms.attach(event)

    def _client_gone(self, event: ev.ClientGone) -> None:
        request = self._rooms.detach(event.client)
        if request is not None:
            self._end_now(request, None)

    # ---- time, loss, drain
    def _deadline(self, _: DeadlinePassed) -> None:
        if self._rooms.round is not None and self._now >= self._rooms.round.launched_at + ROUND_S:
            message = f"round {self._rooms.round.round_id} was not answered within {ROUND_S:g} s"
            self._lose(ev.Failure("engine_lost", f"decode engine {self.shape.engine_id}: {message}"))
            return
        for request in [r for r in self._rooms if self._now >= self._rooms.due(r)]:
            match request.state:
                case Releasing(waiting=ranks):
                    message = f"agents of ranks {sorted(ranks)} did not let go of room {request.room} within {DRAIN_S:g} s"
                    self._lose(ev.Failure("engine_lost", f"decode engine {self.shape.engine_id}: {message}"))
                    return
                case Lingering():
                    self._rooms.forget(request)
                case _:
                    self._end_now(request, request.overdue(self._now))

    def _prefill_lost(self, event: ev.PrefillLost) -> None:
        engine = self.pairs.pop(event.pair, None)
        self._refused.pop(event.pair, None)
        for request in [r for r in self._rooms if r.asked.pair == event.pair]:
            request.awaited = False
            request.orphaned = isinstance(request.state, Reserved | Receiving | Releasing)
            if not isinstance(request.state, Installed | Decoding):
                message = f"prefill engine {engine} was lost before its request was handed over ({event.reason}); try again"
                self._end_now(request, ev.Failure("engine_lost", message))

    def _engine_failed(self, event: ev.EngineFailed) -> None:
        self._lose(event.failure)

    def _lose(self, failure: ev.Failure) -> None:
        """Fail everyone and stop for good."""
        self._rooms.round = None
        for request in self._rooms:
            match request.state:
                case Reserved() | Receiving():
                    self._rooms.end(request, ev.ToldByPrefill())
                    self._rooms.give_back(request.state.holding)
                    self._leave_unheard(request, failure)
                case Releasing():
                    self._rooms.give_back(request.state.holding)
                    self._leave_unheard(request, failure)
                case Installed() | Decoding():
                    self._finish(request, failure)
                case Finishing(holding=holding, progress=progress):
                    self._leave(request, holding, progress)
                case Lingering():
                    pass
        self._rooms.requests.clear()
        self._rooms.clients.clear()
        self._refused.clear()
        self._lost = True
        self._rooms.emit(ev.LoseEngine(failure))

    def _drain(self, _: ev.DrainAsked) -> None:
        self.draining = self._emptied_due = True

    # ---- what every handler uses
    def _from_agent(self, event: ev.AgentRankReady | ev.AgentRoomFailed | ev.AgentDrained) -> None:
        request = self._rooms.requests.get(event.room)
        if request is None:
            self._rooms.totals["late_messages"] += 1
        else:
            self._dispatch(request, event)

    def _dispatch(self, request: Request, event: object) -> None:
        handler = self.ROOM_HANDLERS.get((request.state.phase, type(event)))
        if handler is None:
            raise RuntimeError(f"no rule for {event} in {request}")
        handler(self, request, event)

    def _ignore(self, _request: Request, _event: Any) -> None:
        self._rooms.totals["late_messages"] += 1

    def _tell_who_waits(self) -> None:
        if self._rooms.capacity_freed:
            self._rooms.effects += [ev.CapacityFreed(pair) for pair in self._refused]
            self._refused.clear()
        self._rooms.capacity_freed = False
        if self._emptied_due and not self._rooms.requests:
            self._emptied_due = False
            self._rooms.emit(ev.Emptied())

    def _already_ending(self, _request: Request, _event: ev.EndAsked) -> None:
        """Ending is idempotent."""

    HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ev.PrefillPaired: _paired,
        ev.ReserveAsked: _reserve,
        ev.CancelRoom: _cancel_room,
        ev.PrefillLost: _prefill_lost,
        ev.AgentRankReady: _from_agent,
        ev.AgentRoomFailed: _from_agent,
        ev.AgentDrained: _from_agent,
        ev.ClientAttached: _attach,
        ev.ClientGone: _client_gone,
        ev.CancelRequested: _cancel_request,
        ev.RoundDone: _round_done,
        ev.DrainAsked: _drain,
        ev.EngineFailed: _engine_failed,
        DeadlinePassed: _deadline,
    }
    ROOM_HANDLERS: ClassVar[dict[tuple[Phase, type], Callable[[Any, Request, Any], None]]] = {
        (Phase.RESERVED, ev.AgentRankReady): _arrive,
        (Phase.RESERVED, ev.AgentRoomFailed): _room_failed,
        (Phase.RESERVED, ev.AgentDrained): _drained_unasked,
        (Phase.RESERVED, ev.EndAsked): _end_waiting,
        (Phase.RECEIVING, ev.AgentRankReady): _arrive,
        (Phase.RECEIVING, ev.AgentRoomFailed): _room_failed,
        (Phase.RECEIVING, ev.AgentDrained): _drained_unasked,
        (Phase.RECEIVING, ev.EndAsked): _end_waiting,
        (Phase.RELEASING, ev.AgentDrained): _drained,
        (Phase.RELEASING, ev.AgentRankReady): _ignore,
        (Phase.RELEASING, ev.AgentRoomFailed): _ignore,
        (Phase.RELEASING, ev.EndAsked): _already_ending,
        (Phase.INSTALLED, ev.EndAsked): _end_resident,
        (Phase.DECODING, ev.EndAsked): _end_resident,
        (Phase.FINISHING, ev.EndAsked): _already_ending,
        (Phase.LINGERING, ev.EndAsked): _already_ending,
        # an installed request needs its agents no more
        **dict.fromkeys(
            product(
                (Phase.INSTALLED, Phase.DECODING, Phase.FINISHING, Phase.LINGERING),
                (ev.AgentRankReady, ev.AgentRoomFailed, ev.AgentDrained),
            ),
            _ignore,
        ),
    }
