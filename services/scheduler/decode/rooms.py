"""All rooms of the engine and what they hold: the planner's state, with the verbs that its handlers share."""

from collections import deque
from collections.abc import Iterator, Sequence

import services.scheduler.decode.events as ev
from services.contracts.geometry import verify_widths
from services.contracts.ids import Replica, Room, Token
from services.contracts.lifecycle import State
from services.scheduler.decode import invariants, report
from services.scheduler.decode.capacity import Holding, Pool
from services.scheduler.decode.images import ImagePool
from services.scheduler.decode.lineup import Lineup
from services.scheduler.decode.request import (
    Decoding,
    Installed,
    Phase,
    Progress,
    Releasing,
    Request,
    Retracting,
    Tombstones,
)
from services.scheduler.decode.rounds import LaunchedRound
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import Widths

TOTALS = (
    "rounds", "tokens", "requests_finished", "requests_failed", "requests_cancelled", "capacity_aborts",
    "retractions", "restores", "reservations_refused", "late_messages",
    "prefix_cache_queries", "prefix_cache_hits",
)  # fmt: skip


def acceptance_totals(width: int) -> tuple[str, ...]:
    """What is counted of a drafter's work: rounds of a replica by their width; proposals that were verified and those of them
    that were right, windows that had any, in how many of them there was a k-th, and in how many the first k were right. The
    windows that came with the handoff are counted once more by themselves."""
    if width == 1:
        return ()
    rounds = (f"rounds_of_width_{w}" for w in verify_widths(width))
    positions = (f"{what}_at_{k}" for what in ("drafted", "accepted") for k in range(1, width))
    return (*rounds, "tokens_drafted", "tokens_accepted", "windows", *positions, "handoff_windows", "handoff_accepted")


class Rooms:
    """Requests by room, the pools they draw on, the clients that follow them, and the effects of the event at hand."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.totals: dict[str, int] = dict.fromkeys((*TOTALS, *acceptance_totals(shape.verify_width)), 0)
        self.widths = Widths(shape.replicas, shape.verify_width, shape.adaptive)
        self.pools = [Pool(Replica(r), shape.places, shape.num_blocks, shape.num_slots) for r in range(shape.replicas)]
        self.images = [
            ImagePool(Replica(r), shape.image_blocks, shape.state_blocks, shape.places) for r in range(shape.replicas)
        ]
        self.requests: dict[Room, Request] = {}
        self.suspended: list[dict[Room, Request]] = [{} for _ in range(shape.replicas)]  # the longest first
        self.residents: list[dict[Room, Request]] = [{} for _ in range(shape.replicas)]  # installed and going on, newest last
        self.lineup = Lineup(shape)
        self.joined: set[Replica] = set()  # replicas with somebody new since the last plan
        self.clients: dict[ev.Client, Room] = {}
        self.tombstones = Tombstones()
        self.rounds: deque[LaunchedRound] = deque()  # that are out, in order
        self.landed_at = 0.0  # the last of those before
        self.capacity_freed = False  # by the event at hand
        self.now = 0.0  # of the event at hand
        self.effects: list[ev.Effect] = []

    def __iter__(self) -> Iterator[Request]:
        """A snapshot: handlers end requests while they walk."""
        return iter(list(self.requests.values()))

    # ---- verbs
    def emit(self, effect: ev.Effect) -> None:
        self.effects.append(effect)

    def write(self, request: Request, state: State, fields: report.Fields = ()) -> None:
        asked = request.asked
        self.emit(ev.WriteTransition(asked.request_id, state, asked.attempt, request.next_step(state), fields))

    def publish(self, said: Sequence[tuple[Request, tuple[Token, ...]]]) -> None:
        """What requests get, in this order; who has no client any more counts all the same."""
        self.totals["tokens"] += sum(len(tokens) for _, tokens in said)
        heard = tuple([(request.client, tokens) for request, tokens in said if request.client is not None])
        if heard:
            self.emit(ev.PublishTokens(heard))

    def end(self, request: Request, end: ev.End) -> None:
        request.end = end
        if request.client is not None:
            self.emit(ev.PublishEnd(request.client, end))

    def ignore(self, _request: Request, _event: object) -> None:
        """A message that came too late to matter."""
        self.totals["late_messages"] += 1

    def seat(self, request: Request) -> None:
        """A request is among its replica's residents from now on, or again, the newest last."""
        residents = self.residents[request.replica]
        younger = [room for room, other in residents.items() if _order(other) > _order(request)]
        residents[request.room] = request
        for room in younger:
            residents[room] = residents.pop(room)
        self.lineup.join(request)

    def unseat(self, request: Request) -> None:
        """A resident ends or makes way."""
        state = request.state
        assert isinstance(state, Installed | Decoding)
        del self.residents[state.holding.replica][request.room]
        self.lineup.leave(request, state)

    def give_back(self, holding: Holding) -> None:
        self._keep_unread(holding)
        self.pools[holding.replica].give_back(holding)
        self.capacity_freed = True

    def _keep_unread(self, holding: Holding) -> None:
        """Blocks that a copy still to be planned has to read do not become free: they go back to the request they are of."""
        for request in self.suspended[holding.replica].values():
            state = request.state
            if isinstance(state, Retracting) and state.round_id is None:
                unread = [block for block in holding.own_blocks if block in state.table]
                holding.blocks = [block for block in holding.blocks if block not in unread]
                state.holding.blocks += unread

    def leave(self, request: Request, progress: Progress, holding: Holding | None) -> None:
        """An installed request that has ended is gone, with what it holds."""
        end = request.end
        assert isinstance(end, ev.Finished | ev.Failure)
        if holding is not None:
            self.give_back(holding)
        state, fields = report.ended(end, progress)
        self.write(request, state, fields)
        kinds = {State.FINISHED: "requests_finished", State.CANCELLED: "requests_cancelled"}
        self.totals[kinds.get(state, "requests_failed")] += 1
        if request.awaited:
            self.emit(ev.RoomEnded(request.asked.pair, request.room, end if isinstance(end, ev.Failure) else None))
        self.forget(request)

    def forget(self, request: Request) -> None:
        assert request.end is not None
        del self.requests[request.room]
        if request.client is not None:
            del self.clients[request.client]
        self.tombstones.bury(request.room, request.end)

    # ---- clients
    def attach(self, event: ev.ClientAttached) -> Request | None:
        """A client's stream follows its request from the first token, or ends with the reason why not -> that request."""
        request = self.requests.get(event.room)
        if request is None or request.asked.request_id != event.request_id or request.attached:
            self.emit(ev.PublishEnd(event.client, self._why_not(event, request)))
            return None
        request.client, request.attached = event.client, True
        self.clients[event.client] = event.room
        if request.end is not None:
            self.emit(ev.PublishEnd(event.client, request.end))
        return request

    def detach(self, client: ev.Client) -> Request | None:
        """The stream ended -> the request that it followed, if that is still here."""
        room = self.clients.pop(client, None)
        if room is None:
            return None
        request = self.requests[room]
        request.client = None
        return request

    def _why_not(self, event: ev.ClientAttached, request: Request | None) -> ev.End:
        end = self.tombstones.end_of(event.room)
        if isinstance(end, ev.Failure | ev.ToldByPrefill):
            return end
        if isinstance(end, ev.Finished) or (request is not None and request.asked.request_id == event.request_id):
            return ev.Failure("bad_request", f"{event.request_id} was attached before; its tokens cannot be read twice")
        message = f"room {event.room} of {event.request_id} is not known here; attach with what the Attached event named"
        return ev.Failure("not_found", message)

    # ---- questions
    @property
    def round_since(self) -> float:
        """When the first of the rounds that are out began to run."""
        return max(self.rounds[0].launched_at, self.landed_at)

    def last_round(self, state: Decoding) -> int | None:
        """The last of the rounds that are out which has this resident."""
        last = self.lineup.launched if state.until is None else state.until
        return last if self.rounds and last >= self.rounds[0].round_id else None

    def promised(self, replica: Replica) -> int:
        """Blocks that those who hold a place there may still ask for soon."""
        rows = self.shape.rows_ahead
        return sum(request.growth(rows) for request in self.requests.values() if request.replica == replica)

    def due(self, request: Request) -> float:
        """When time alone changes the request; infinite if never."""
        match request.state:
            case Releasing(drained_by=time):
                return time
            case _:
                return request.due

    def counters(self) -> dict[str, int]:
        phases = [request.state.phase for request in self.requests.values()]
        widths: dict[str, int] = {}
        if self.shape.verify_width > 1:
            targets = zip(self.widths.targets, self.residents, strict=True)
            widths = {f"verify_width_{replica}": width if there else 0 for replica, (width, there) in enumerate(targets)}
        return {
            **widths,
            "reserved": phases.count(Phase.RESERVED),
            "receiving": phases.count(Phase.RECEIVING),
            "resident": phases.count(Phase.INSTALLED) + phases.count(Phase.DECODING),
            "retracted": sum(map(len, self.suspended)),
            "finishing": phases.count(Phase.FINISHING),
            "rounds_out": len(self.rounds),
            "quarantined": phases.count(Phase.RELEASING),
            "blocks_used": sum(pool.cache.blocks_in_use for pool in self.pools),
            "slots_used": sum(pool.cache.slots_in_use for pool in self.pools),
            "places_used": sum(pool.places_used for pool in self.pools),
            "image_blocks_used": sum(images.used for images in self.images),
        }

    def check(self) -> None:
        invariants.check_pools(self.requests, self.pools)
        invariants.check_suspended(self.requests, self.suspended, self.images)
        invariants.check_residents(self.requests, self.residents, self.rounds, self.shape.rows_ahead)
        invariants.check_rounds(self.requests, self.rounds, self.lineup.launched)
        invariants.check_lineup(self.lineup, self.residents, self.rounds, self.shape)
        invariants.check_clients(self.requests, self.clients, self.tombstones)


def _order(resident: Request) -> int:
    assert isinstance(resident.state, Installed | Decoding)
    return resident.state.progress.order
