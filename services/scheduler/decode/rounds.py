"""One lockstep round: what each replica's workers are told, and whether their answer fits (spec scheduling §3.1).

A round is planned while the one before it runs, so that the workers go on at once. Nothing in a plan depends on how the
running round ends: a request of it is where it was by at most the rows that the round writes, and has a window of the length
that the round was told to leave. Whoever turns out to have ended lingers in the planned round; what comes of it is dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, Place, Room
from services.scheduler.decode.buckets import RoundMode, shape_of
from services.scheduler.decode.capacity import Pool
from services.scheduler.decode.copies import copies, is_due
from services.scheduler.decode.events import BlockDelta, PlaceInstall, ReplicaPlan, RoundDone, RoundPlan
from services.scheduler.decode.request import Decoding, Installed, Request
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import IDLE, Width, Widths

Row = tuple[Place, Room]
CLEAR_ONLY = (0, RoundMode.LOW_LATENCY_EAGER)


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """A round that is out: the workers may write to everything that its requests hold."""

    round_id: int
    launched_at: float
    rows: tuple[tuple[Row, ...], ...]  # by replica, in the plan's order
    widths: tuple[Width, ...]  # by replica
    copied: tuple[Room, ...] = ()  # whose images are written or read, in the plan's order


def launch(
    round_id: int,
    shape: EngineShape,
    pools: Sequence[Pool],
    residents: Sequence[dict[Room, Request]],
    suspended: Sequence[dict[Room, Request]],
    out: LaunchedRound | None,
    widths: Widths,
    now: float,
) -> tuple[RoundPlan, LaunchedRound] | None:
    """Build the round of all residents that have the blocks for it and that `out`, the round before it if that still runs, does
    not surely end, and mark them as being in it; None if there is nothing to do on any replica.

    Every replica takes part, with the same bucket. Places that ended since the last round are cleared along with it, and images
    are copied; where nobody can run, by a round of bucket 0, in which nothing does.
    """
    lines = [_line_up(requests.values(), shape, out) for requests in residents]
    live_rows = [len(line.rows) for line in lines]
    size = shape_of(live_rows, shape.buckets, shape.graphs)
    if size is not None:
        how_wide = widths.plan(size[0], live_rows, [line.window for line in lines])
    elif any(is_due(it) for requests in suspended for it in requests.values()):
        size, how_wide = CLEAR_ONLY, (IDLE,) * len(pools)
    elif any(pool.clears for pool in pools) and not any(residents):
        size, how_wide = CLEAR_ONLY, (IDLE,) * len(pools)
    else:
        return None
    parts: list[ReplicaPlan] = []
    rows: list[tuple[Row, ...]] = []
    copied: list[Room] = []
    for pool, line, away, width in zip(pools, lines, suspended, how_wide, strict=True):
        installs, deltas = _changes(line, round_id)
        retracts, restores = copies(away.values(), round_id) if away else ((), ())
        copied += [it.room for it in retracts] + [it.install.room for it in restores]
        live = tuple([place for place, _ in line.rows])
        parts.append(ReplicaPlan(tuple(sorted(pool.clears)), installs, deltas, live, width, retracts, restores))
        rows.append(tuple([(place, request.asked.room) for place, request in line.rows]))
        pool.clears.clear()
    return RoundPlan(round_id, *size, tuple(parts)), LaunchedRound(round_id, now, tuple(rows), how_wide, tuple(copied))


def mismatch(launched: LaunchedRound | None, done: RoundDone) -> str | None:
    """Why an answer cannot be that of the round that is out: one entry a live place, in order, with 1..width tokens and the
    window that the plan asked for."""
    if launched is None or done.round_id != launched.round_id:
        return f"round {done.round_id} was answered, but {launched.round_id if launched else 'no round'} is out"
    expected = [[place for place, _ in rows] for rows in launched.rows]
    answered = [[entry.place for entry in entries] for entries in done.replicas]
    if answered != expected:
        return f"round {done.round_id} ran places {expected}, but {answered} were answered"
    if done.copied != launched.copied:
        return f"round {done.round_id} copied the images of rooms {launched.copied}, but {done.copied} were answered"
    for it, entries in zip(launched.widths, done.replicas, strict=True):
        window = 1 + it.proposals
        for entry in entries:
            if not 1 <= len(entry.tokens) <= it.width or len(entry.window) != window or entry.window[0] != entry.tokens[-1]:
                return (
                    f"round {done.round_id}, place {entry.place}: {entry.tokens} with the next window {entry.window}; "
                    f"expected 1 to {it.width} tokens and a window of {window} that begins with the last of them"
                )
    return None


def _changes(line: "_Line", round_id: int) -> tuple[tuple[PlaceInstall, ...], tuple[BlockDelta, ...]]:
    """What the workers do not know yet of these requests; afterwards they do."""
    installs: list[PlaceInstall] = []
    deltas: list[BlockDelta] = []
    for _, request in line.rows:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        holding, progress = state.holding, state.progress
        if isinstance(state, Installed):
            request.state = Decoding(holding, progress, known_blocks=len(holding.blocks), round_id=round_id)
            installs.append(
                PlaceInstall(
                    place=holding.place,
                    room=request.room,
                    blocks=tuple(holding.blocks),
                    slot=holding.slot,
                    position=progress.position,
                    window=progress.window,
                    sampling=request.asked.sampling,
                )
            )
            continue
        if len(holding.blocks) > state.known_blocks:
            deltas.append(BlockDelta(holding.place, tuple(holding.blocks[state.known_blocks :])))
            state.known_blocks = len(holding.blocks)
        state.round_id = round_id
    return tuple(installs), tuple(deltas)


def surely_ends(request: Request, out: LaunchedRound | None) -> bool:
    """Whether the round that is out gives a resident its last token, however few it gives: one at least."""
    assert isinstance(request.state, Installed | Decoding)
    return _part_in(request, out) is not None and request.state.progress.completion + 1 >= request.budget


def blocks_next(request: Request, shape: EngineShape, out: LaunchedRound | None) -> int:
    """Blocks that a resident holds when its next round is launched: up to the last row that this round may write, wherever the
    round that is out leaves it."""
    assert isinstance(request.state, Installed | Decoding)
    part = _part_in(request, out)
    moved = 0 if part is None else part.width
    return blocks_for(request.state.progress.position + moved + shape.rows_ahead)


@dataclass(slots=True)
class _Line:
    """Who is in a replica's next round, by place, and the tokens of the shortest window when the round that is out has landed,
    padding not counted; 1 where nobody is."""

    rows: list[tuple[Place, Request]]
    window: int


def _line_up(requests: Iterable[Request], shape: EngineShape, out: LaunchedRound | None) -> _Line:
    """Who has not surely ended by then, and has the blocks; without them one waits. One pass, for it is over everybody."""
    rows: list[tuple[Place, Request]] = []
    windows: set[int] = set()
    ahead = shape.rows_ahead
    for request in requests:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        holding, progress = state.holding, state.progress
        moved, window = 0, progress.usable
        if (part := _part_in(request, out)) is not None:
            if progress.completion + 1 >= request.budget:
                continue
            moved, window = part.width, 1 + part.proposals
        if len(holding.blocks) * BLOCK_TOKENS >= progress.position + moved + ahead:
            rows.append((holding.place, request))
            windows.add(window)
    rows.sort(key=_place)
    return _Line(rows, min(windows, default=1))


def _part_in(request: Request, out: LaunchedRound | None) -> Width | None:
    """What the round that is out does with a resident; None if it is not in it."""
    state = request.state
    if out is None or not isinstance(state, Decoding) or state.round_id != out.round_id:
        return None
    return out.widths[state.holding.replica]


def _place(row: tuple[Place, Request]) -> Place:
    return row[0]
