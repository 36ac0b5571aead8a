"""Who is in the next round, kept from round to round: planning one touches only those for whom it changes something.

A resident is in its replica's line from its first round on, until it ends, makes way, or lacks the blocks of a round. When a
round has landed, whoever may run full of its blocks within the next two gets more, if there are free ones for all who may.
Who got none, or has its last token coming, is near its end and is looked at for every round, as are those in no line:
newcomers, and who waits for blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, Place, Replica, Room
from services.scheduler.decode.buckets import RoundMode, shape_of
from services.scheduler.decode.capacity import Holding, Pool
from services.scheduler.decode.copies import copies, install_of, is_due
from services.scheduler.decode.events import PlaceInstall, ReplicaPlan, RoundPlan
from services.scheduler.decode.request import Decoding, Installed, Request
from services.scheduler.decode.rounds import LaunchedRound, Row, blocks_next, part_in, surely_ends
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import IDLE, Width, Widths

CLEAR_ONLY = (0, RoundMode.LOW_LATENCY_EAGER)
NOTHING = ReplicaPlan((), (), (), IDLE)
ROUNDS_AHEAD = 2  # that may be planned before the next one lands

Wanted = tuple[Request, Decoding | Installed, int]  # with so many blocks in all


@dataclass(slots=True)
class Line:
    """One replica's, and what its workers do not know yet of those in it."""

    members: dict[Place, Request] = field(default_factory=dict[Place, Request])
    moved: bool = False  # somebody joined or left since the last round
    rows: tuple[Row, ...] = ()  # of that round, by place
    quiet: ReplicaPlan = NOTHING  # that round's part, if it had nothing but its rows
    joined: dict[Place, Request] = field(default_factory=dict[Place, Request])


class Lineup:
    """All replicas' lines."""

    def __init__(self, shape: EngineShape):
        self.lines = [Line() for _ in range(shape.replicas)]
        self.beside: dict[Room, Request] = {}  # in no line
        self.near: dict[Room, Request] = {}  # in line, and perhaps not in the next round
        self.launched = 0  # rounds
        self._shape = shape
        self._margin = shape.rows_ahead + ROUNDS_AHEAD * shape.verify_width
        self._deltas: dict[Replica, dict[Place, tuple[BlockId, ...]]] = {}  # that the workers do not know yet
        self._touched: set[Replica] = set()  # whose part of the next round is not that of the last one
        self._live = [0] * shape.replicas  # members
        self._windows = [1] * shape.replicas  # tokens of a line's shortest window when the last round has landed, no padding
        self._parts = [NOTHING] * shape.replicas  # of the last round
        self._rows: list[tuple[Row, ...]] = [()] * shape.replicas  # likewise
        self._widths = (IDLE,) * shape.replicas  # likewise

    # ---- who is there
    def join(self, request: Request) -> None:
        """A resident more."""
        self.beside[request.room] = request

    def leave(self, request: Request, state: Installed | Decoding) -> None:
        """A resident less."""
        if isinstance(state, Decoding) and state.until is None:
            self._drop(request, state)
        self.beside.pop(request.room, None)
        self._touched.add(state.holding.replica)

    def touch(self, replica: Replica) -> None:
        """Places are to be cleared or images to be copied there."""
        self._touched.add(replica)

    # ---- blocks
    def is_near(self, request: Request, holding: Holding, position: int, completion: int) -> bool:
        """Whether somebody at this position may lack blocks for one of the next rounds, or has its last token coming."""
        return len(holding.blocks) * BLOCK_TOKENS < position + self._margin or completion + 1 >= request.budget

    def landed(self, near: Iterable[Request], pools: Sequence[Pool]) -> None:
        """These were in the round that has landed. They get the blocks of the rounds before the next one lands, as far as they
        will say so much, if there are free ones for all of their replica."""
        wanted: list[Wanted] = []
        for request in near:
            state = request.state
            if isinstance(state, Decoding) and state.until is None:
                self.near[request.room] = request
                left = request.budget - 1 - state.progress.completion
                rows = self._shape.rows_ahead + min(left, ROUNDS_AHEAD * self._shape.verify_width)
                if left > 0:
                    wanted.append((request, state, blocks_for(state.progress.position + rows)))
        self._grow_all(wanted, pools)
        for request, state, _ in wanted:
            assert isinstance(state, Decoding)
            self._watch(request, state, None)

    def secure(self, out: LaunchedRound, pools: Sequence[Pool]) -> bool:
        """Whether everybody gets the blocks of the round behind `out`, too, without taking them from somebody: whom to take
        them from is decided when it is known who has ended. If so they have them."""
        wanted: list[Wanted] = []
        for request in (*self.near.values(), *self.beside.values()):
            state = request.state
            assert isinstance(state, Installed | Decoding)
            if not surely_ends(request, out):
                wanted.append((request, state, blocks_next(request, self._shape, out)))
        return self._grow_all(wanted, pools)

    def _grow_all(self, wanted: Iterable[Wanted], pools: Sequence[Pool]) -> bool:
        """All of a replica, or none of it -> whether it was all of all."""
        lacking: dict[Replica, int] = {}
        for _, state, blocks in wanted:
            more = blocks - len(state.holding.blocks)
            if more > 0:
                lacking[state.holding.replica] = lacking.get(state.holding.replica, 0) + more
        enough = {replica for replica, more in lacking.items() if more <= pools[replica].cache.blocks_available}
        for _, state, blocks in wanted if enough else ():
            if state.holding.replica in enough:
                self.grow(pools[state.holding.replica], state, blocks)
        return len(enough) == len(lacking)

    def grow(self, pool: Pool, state: Installed | Decoding, blocks: int) -> bool:
        """Bring a resident to `blocks` blocks; False and no change if they are not there."""
        if len(state.holding.blocks) >= blocks:
            return True
        grown = pool.grow(state.holding, blocks)
        if grown and isinstance(state, Decoding) and state.until is None:
            self._tell(state)
        return grown

    def _tell(self, state: Decoding) -> None:
        """The next round brings the workers the blocks that they do not know."""
        holding, known = state.holding, state.known_blocks
        if known:
            deltas = self._deltas.setdefault(holding.replica, {})
            deltas[holding.place] = (*deltas.get(holding.place, ()), *holding.blocks[known:])
            state.known_blocks = len(holding.blocks)

    # ---- the next round
    def launch(
        self,
        out: LaunchedRound | None,
        pools: Sequence[Pool],
        residents: Sequence[dict[Room, Request]],
        suspended: Sequence[dict[Room, Request]],
        widths: Widths,
        now: float,
    ) -> tuple[RoundPlan, LaunchedRound] | None:
        """Build the round of all residents that have the blocks for it and that `out`, the round before it if that still runs,
        does not surely end; None if there is nothing to do on any replica.

        Every replica takes part, with the same bucket. Places that ended since the last round are cleared along with it, and
        images are copied; where nobody can run, by a round of bucket 0, in which nothing does.
        """
        self._line_up(out)
        size = shape_of(self._live, self._shape.buckets, self._shape.graphs)
        if size is not None:
            how_wide = widths.plan(size[0], self._live, self._windows)
        elif any(is_due(it) for requests in suspended for it in requests.values()) or (
            any(pool.clears for pool in pools) and not any(residents)
        ):
            size, how_wide = CLEAR_ONLY, (IDLE,) * len(pools)
        else:
            return None
        self.launched += 1
        copied = self._write_parts(how_wide, pools, suspended)
        plan = RoundPlan(self.launched, *size, tuple(self._parts), self._deltas)
        self._deltas = {}
        return plan, LaunchedRound(self.launched, now, tuple(self._rows), how_wide, copied)

    def _write_parts(
        self, how_wide: tuple[Width, ...], pools: Sequence[Pool], suspended: Sequence[dict[Room, Request]]
    ) -> tuple[Room, ...]:
        """Each replica's part where it is not that of the last round -> whose images are copied."""
        touched, self._touched = self._touched, set()
        if how_wide != self._widths:
            touched.update(Replica(n) for n, (new, old) in enumerate(zip(how_wide, self._widths, strict=True)) if new != old)
            self._widths = how_wide
        copied: list[Room] = []
        for replica in sorted(touched):
            line, pool, width, away = self.lines[replica], pools[replica], how_wide[replica], suspended[replica]
            part = self._quiet_part(line, width)
            self._rows[replica] = line.rows
            self._windows[replica] = 1 + width.proposals if line.rows else 1
            if line.joined or pool.clears or away:
                installs = self._installs(line)
                retracts, restores = copies(away.values(), self.launched) if away else ((), ())
                copied += [it.room for it in retracts] + [it.install.room for it in restores]
                part = ReplicaPlan(tuple(sorted(pool.clears)), installs, part.live, width, retracts, restores)
                pool.clears.clear()
                self._touched.add(replica)  # the round after this one says that no more
            self._parts[replica] = part
        return tuple(copied)

    def _quiet_part(self, line: Line, width: Width) -> ReplicaPlan:
        if line.moved:
            line.rows = tuple([(place, line.members[place].room) for place in sorted(line.members)])
        if line.moved or line.quiet.width != width:
            line.quiet = ReplicaPlan((), (), tuple([place for place, _ in line.rows]), width)
            line.moved = False
        return line.quiet

    def _installs(self, line: Line) -> tuple[PlaceInstall, ...]:
        """Whom the workers do not know; afterwards they do."""
        installs: list[PlaceInstall] = []
        for place in sorted(line.joined):
            request = line.joined[place]
            state = request.state
            assert isinstance(state, Decoding)
            installs.append(install_of(request, state))
            state.known_blocks = len(state.holding.blocks)
        line.joined.clear()
        return tuple(installs)

    def _line_up(self, out: LaunchedRound | None) -> None:
        """Who leaves the line and who joins it for the next round."""
        for request in list(self.near.values()):
            state = request.state
            assert isinstance(state, Decoding)
            ends = surely_ends(request, out)
            if ends or len(state.holding.blocks) < blocks_next(request, self._shape, out):
                self._drop(request, state)
                if not ends:
                    self.beside[request.room] = request
            else:
                self._watch(request, state, part_in(request, out))
        for request in list(self.beside.values()):
            if surely_ends(request, out):
                del self.beside[request.room]
                continue
            assert isinstance(request.state, Installed | Decoding)
            if len(request.state.holding.blocks) >= blocks_next(request, self._shape, out):
                del self.beside[request.room]
                self._put(request, out)

    def _put(self, request: Request, out: LaunchedRound | None) -> None:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        holding, progress, replica = state.holding, state.progress, state.holding.replica
        line, part = self.lines[replica], part_in(request, out)
        window = progress.usable if part is None else 1 + part.proposals
        self._windows[replica] = min(self._windows[replica], window) if self._live[replica] else window
        line.members[holding.place] = request
        line.moved = True
        self._live[replica] += 1
        self._touched.add(replica)
        if isinstance(state, Installed):
            request.state = state = Decoding(holding, progress, known_blocks=0, until=None)
            line.joined[holding.place] = request
        else:
            state.until = None
            if len(holding.blocks) > state.known_blocks:
                self._tell(state)
        self._watch(request, state, part)

    def _watch(self, request: Request, state: Decoding, part: Width | None) -> None:
        """Note whether somebody in line is near its end when the next round begins; `part`: in the round that is out."""
        moved = 0 if part is None else part.width
        if self.is_near(request, state.holding, state.progress.position + moved, state.progress.completion + moved):
            self.near[request.room] = request
        else:
            self.near.pop(request.room, None)

    def _drop(self, request: Request, state: Decoding) -> None:
        replica, place = state.holding.replica, state.holding.place
        line = self.lines[replica]
        del line.members[place]
        line.joined.pop(place, None)
        state.known_blocks -= len(self._deltas.get(replica, {}).pop(place, ()))
        line.moved = True
        self._live[replica] -= 1
        self.near.pop(request.room, None)
        state.until = self.launched
        self._touched.add(replica)
