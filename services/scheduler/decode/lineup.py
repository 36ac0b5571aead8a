"""Who is in the next round, kept from round to round: planning one touches only those for whom it changes something.

A resident is in its replica's line from its first round on, until it ends, makes way, or lacks the blocks of a round. While it
is in line nobody has to look at it before the first round for which it may lack blocks or which it may not reach, however many
tokens the rounds until then give it. Residents that are in no line, newcomers and those who wait for blocks, are looked at
for every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.contracts.ids import BLOCK_TOKENS, Place, Replica, Room
from services.scheduler.decode.buckets import RoundMode, shape_of
from services.scheduler.decode.capacity import Holding, Pool
from services.scheduler.decode.copies import copies, is_due
from services.scheduler.decode.events import BlockDelta, PlaceInstall, ReplicaPlan, RoundPlan
from services.scheduler.decode.request import Decoding, Installed, Request
from services.scheduler.decode.rounds import LaunchedRound, Row, blocks_next, part_in, surely_ends
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import IDLE, Width, Widths

CLEAR_ONLY = (0, RoundMode.LOW_LATENCY_EAGER)
NOTHING = ReplicaPlan((), (), (), (), IDLE)


@dataclass(slots=True)
class Line:
    """One replica's, and what its workers do not know yet of those in it."""

    members: dict[Place, Request] = field(default_factory=dict[Place, Request])
    window: int = 1  # tokens of the shortest window when the last round has landed, padding not counted; 1 where nobody is
    moved: bool = False  # somebody joined or left since the last round
    rows: tuple[Row, ...] = ()  # of that round, by place
    quiet: ReplicaPlan = NOTHING  # that round's part, if it had nothing but its rows
    news: dict[Place, Request] = field(default_factory=dict[Place, Request])  # who joined or got blocks


class Lineup:
    """All replicas' lines, and the calendar of looks."""

    def __init__(self, shape: EngineShape):
        self.lines = [Line() for _ in range(shape.replicas)]
        self.beside: dict[Room, Request] = {}  # in no line
        self.launched = 0  # rounds
        self._shape = shape
        self._looks: dict[int, dict[Room, Request]] = {}  # by round
        self._touched: set[Replica] = set()  # whose part of the next round is not that of the last one
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
            self._drop(state)
        self.beside.pop(request.room, None)
        self._touched.add(state.holding.replica)

    def grow(self, pool: Pool, holding: Holding, blocks: int) -> bool:
        """Bring a resident to `blocks` blocks; False and no change if they are not there."""
        held = len(holding.blocks)
        if held >= blocks:
            return True
        grown = pool.grow(holding, blocks)
        line = self.lines[pool.replica]
        member = line.members.get(holding.place)
        if grown and member is not None:
            line.news[holding.place] = member
            self._touched.add(pool.replica)
        return grown

    def touch(self, replica: Replica) -> None:
        """Places are to be cleared or images to be copied there."""
        self._touched.add(replica)

    # ---- the next round
    def secure(self, out: LaunchedRound, pools: Sequence[Pool]) -> bool:
        """Whether everybody gets the blocks of the round behind `out`, too, without taking them from somebody: whom to take
        them from is decided when it is known who has ended. If so they have them."""
        wanted: list[tuple[Pool, Holding, int]] = []
        lacking: dict[Replica, int] = {}
        for request in (*self._due(), *self.beside.values()):
            assert isinstance(request.state, Installed | Decoding)
            holding, blocks = request.state.holding, blocks_next(request, self._shape, out)
            more = blocks - len(holding.blocks)
            if more > 0 and not surely_ends(request, out):
                wanted.append((pools[holding.replica], holding, blocks))
                lacking[holding.replica] = lacking.get(holding.replica, 0) + more
        if any(more > pools[replica].cache.blocks_available for replica, more in lacking.items()):
            return False
        for pool, holding, blocks in wanted:
            self.grow(pool, holding, blocks)
        return True

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
        live = [len(line.members) for line in self.lines]
        size = shape_of(live, self._shape.buckets, self._shape.graphs)
        if size is not None:
            how_wide = widths.plan(size[0], live, [line.window for line in self.lines])
        elif any(is_due(it) for requests in suspended for it in requests.values()) or (
            any(pool.clears for pool in pools) and not any(residents)
        ):
            size, how_wide = CLEAR_ONLY, (IDLE,) * len(pools)
        else:
            return None
        self.launched += 1
        copied = self._write_parts(how_wide, pools, suspended)
        plan = RoundPlan(self.launched, *size, tuple(self._parts))
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
            if line.news or pool.clears or away:
                installs, deltas = _news(line)
                retracts, restores = copies(away.values(), self.launched) if away else ((), ())
                copied += [it.room for it in retracts] + [it.install.room for it in restores]
                part = ReplicaPlan(tuple(sorted(pool.clears)), installs, deltas, part.live, width, retracts, restores)
                pool.clears.clear()
                self._touched.add(replica)  # the round after this one says that no more
            self._parts[replica] = part
        return tuple(copied)

    def _quiet_part(self, line: Line, width: Width) -> ReplicaPlan:
        if line.moved or line.quiet.width != width:
            if line.moved:
                line.rows = tuple([(place, line.members[place].room) for place in sorted(line.members)])
            line.quiet = ReplicaPlan((), (), (), tuple([place for place, _ in line.rows]), width)
            line.moved = False
        line.window = 1 + width.proposals if line.rows else 1
        return line.quiet

    def _line_up(self, out: LaunchedRound | None) -> None:
        """Who leaves the line and who joins it for the next round."""
        number = self.launched + 1
        for request in self._due():
            state = request.state
            assert isinstance(state, Decoding)
            ends = surely_ends(request, out)
            if ends or len(state.holding.blocks) < blocks_next(request, self._shape, out):
                self._drop(state)
                if not ends:
                    self.beside[request.room] = request
            else:
                self._look_again(request, state, out)
        self._looks.pop(number, None)
        for request in list(self.beside.values()):
            state = request.state
            assert isinstance(state, Installed | Decoding)
            if surely_ends(request, out):
                del self.beside[request.room]
            elif len(state.holding.blocks) >= blocks_next(request, self._shape, out):
                del self.beside[request.room]
                self._put(request, out)

    def _put(self, request: Request, out: LaunchedRound | None) -> None:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        holding, line = state.holding, self.lines[state.holding.replica]
        part = part_in(request, out)
        window = state.progress.usable if part is None else 1 + part.proposals
        line.window = min(line.window, window) if line.members else window
        line.members[holding.place] = line.news[holding.place] = request
        line.moved = True
        self._touched.add(holding.replica)
        if isinstance(state, Decoding):
            self._look_again(request, state, out)
            state.until = None
        else:
            request.state = state = Decoding(holding, state.progress, known_blocks=0, until=None)
            self._look_again(request, state, None)

    def _drop(self, state: Decoding) -> None:
        replica, place = state.holding.replica, state.holding.place
        line = self.lines[replica]
        del line.members[place]
        line.news.pop(place, None)
        line.moved = True
        state.until = self.launched
        self._touched.add(replica)

    def _look_again(self, request: Request, state: Decoding, out: LaunchedRound | None) -> None:
        """Note the first round after the next one for which it may lack blocks, or which it may not reach."""
        progress, most = state.progress, self._shape.verify_width
        part = part_in(request, out)
        moved = 0 if part is None else part.width  # at most, when the next round begins
        rows_left = len(state.holding.blocks) * BLOCK_TOKENS - self._shape.rows_ahead - progress.position - moved
        tokens_left = request.budget - 1 - progress.completion - moved
        rounds = min(rows_left // most, (tokens_left - 1) // most + 1 if tokens_left > 0 else 0)
        state.look = self.launched + 2 + rounds
        self._looks.setdefault(state.look, {})[request.room] = request

    def _due(self) -> list[Request]:
        """Members that must be looked at for the next round."""
        number = self.launched + 1
        noted = self._looks.get(number)
        return [it for it in noted.values() if isinstance(it.state, Decoding) and it.state.due(number)] if noted else []


def _news(line: Line) -> tuple[tuple[PlaceInstall, ...], tuple[BlockDelta, ...]]:
    """What the workers do not know yet of those in line; afterwards they do."""
    installs: list[PlaceInstall] = []
    deltas: list[BlockDelta] = []
    for place in sorted(line.news):
        request = line.news[place]
        state = request.state
        assert isinstance(state, Decoding)
        holding, progress = state.holding, state.progress
        if not state.known_blocks:
            blocks = tuple(holding.blocks)
            window, sampling = progress.window, request.asked.sampling
            installs.append(PlaceInstall(place, request.room, blocks, holding.slot, progress.position, window, sampling))
        elif len(holding.blocks) > state.known_blocks:
            deltas.append(BlockDelta(place, tuple(holding.blocks[state.known_blocks :])))
        state.known_blocks = len(holding.blocks)
    line.news.clear()
    return tuple(installs), tuple(deltas)
