"""One lockstep round: what each replica's workers are told, and whether their answer fits (spec scheduling §3.1)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import Place, Room
from services.scheduler.decode.buckets import RoundMode, shape_of
from services.scheduler.decode.capacity import Pool
from services.scheduler.decode.events import BlockDelta, PlaceInstall, ReplicaPlan, RoundDone, RoundPlan
from services.scheduler.decode.request import Decoding, Installed, Request
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import IDLE, Width, Widths

Row = tuple[Place, Room]
CLEAR_ONLY = (0, RoundMode.LOW_LATENCY_EAGER)


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """The round that is out: the workers may write to everything that its requests hold."""

    round_id: int
    launched_at: float
    rows: tuple[tuple[Row, ...], ...]  # by replica, in the plan's order
    widths: tuple[Width, ...]  # by replica


def launch(
    round_id: int,
    shape: EngineShape,
    pools: Sequence[Pool],
    residents: Sequence[dict[Room, Request]],
    widths: Widths,
    now: float,
) -> tuple[RoundPlan, LaunchedRound] | None:
    """Build the round of all residents and mark them as being in it; None if there is nothing to do on any replica.

    Every replica takes part, with the same bucket. Places that ended since the last round are cleared along with it; where
    nobody lives any more, by a round of bucket 0, in which nothing runs.
    """
    live_rows = [len(requests) for requests in residents]
    size = shape_of(live_rows, shape.buckets, shape.graphs)
    if size is not None:
        how_wide = widths.plan(size[0], live_rows, [_shortest_window(requests.values()) for requests in residents])
    elif any(pool.clears for pool in pools):
        size, how_wide = CLEAR_ONLY, (IDLE,) * len(pools)
    else:
        return None
    parts: list[ReplicaPlan] = []
    rows: list[tuple[Row, ...]] = []
    for pool, requests, width in zip(pools, residents, how_wide, strict=True):
        ordered = sorted(requests.values(), key=_place)
        installs, deltas = _changes(ordered, round_id, shape)
        live = tuple(_place(request) for request in ordered)
        parts.append(ReplicaPlan(tuple(sorted(pool.clears)), installs, deltas, live, width))
        rows.append(tuple(zip(live, (request.room for request in ordered), strict=True)))
        pool.clears.clear()
    return RoundPlan(round_id, *size, tuple(parts)), LaunchedRound(round_id, now, tuple(rows), how_wide)


def mismatch(launched: LaunchedRound | None, done: RoundDone) -> str | None:
    """Why an answer cannot be that of the round that is out: one entry a live place, in order, with 1..width tokens and the
    window that the plan asked for."""
    if launched is None or done.round_id != launched.round_id:
        return f"round {done.round_id} was answered, but {launched.round_id if launched else 'no round'} is out"
    expected = [[place for place, _ in rows] for rows in launched.rows]
    answered = [[entry.place for entry in entries] for entries in done.replicas]
    if answered != expected:
        return f"round {done.round_id} ran places {expected}, but {answered} were answered"
    for it, entries in zip(launched.widths, done.replicas, strict=True):
        window = 1 + it.proposals
        for entry in entries:
            if not 1 <= len(entry.tokens) <= it.width or len(entry.window) != window or entry.window[0] != entry.tokens[-1]:
                return (
                    f"round {done.round_id}, place {entry.place}: {entry.tokens} with the next window {entry.window}; "
                    f"expected 1 to {it.width} tokens and a window of {window} that begins with the last of them"
                )
    return None


def _changes(
    requests: Iterable[Request], round_id: int, shape: EngineShape
) -> tuple[tuple[PlaceInstall, ...], tuple[BlockDelta, ...]]:
    """What the workers do not know yet of these requests; afterwards they do."""
    installs: list[PlaceInstall] = []
    deltas: list[BlockDelta] = []
    for request in requests:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        holding, progress = state.holding, state.progress
        assert len(holding.blocks) >= blocks_for(progress.position + shape.rows_ahead), f"{request.room} lacks a block"
        if isinstance(state, Installed):
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
        elif len(holding.blocks) > state.known_blocks:
            deltas.append(BlockDelta(holding.place, tuple(holding.blocks[state.known_blocks :])))
        request.state = Decoding(holding, progress, known_blocks=len(holding.blocks), round_id=round_id)
    return tuple(installs), tuple(deltas)


def _shortest_window(requests: Iterable[Request]) -> int:
    """Tokens of every request's window, padding not counted; 1 where nobody is."""
    lengths: list[int] = []
    for request in requests:
        assert isinstance(request.state, Installed | Decoding)
        lengths.append(request.state.progress.usable)
    return min(lengths, default=1)


def _place(request: Request) -> Place:
    assert isinstance(request.state, Installed | Decoding)
    return request.state.holding.place
