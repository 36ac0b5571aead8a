"""One lockstep round: what each replica's workers are told, and whether their answer fits (spec scheduling §3.1).

A round is planned while the one before it runs, so that the workers go on at once. Nothing in a plan depends on how the
running round ends: a request of it is where it was by at most the rows that the round writes, and has a window of the length
that the round was told to leave. Whoever turns out to have ended lingers in the planned round; what comes of it is dropped.
"""

from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import Place, Room
from services.scheduler.decode.events import RoundDone
from services.scheduler.decode.request import Decoding, Installed, Request
from services.scheduler.decode.shape import EngineShape
from services.scheduler.decode.widths import Width

Row = tuple[Place, Room]


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """A round that is out: the workers may write to everything that its requests hold."""

    round_id: int
    launched_at: float
    rows: tuple[tuple[Row, ...], ...]  # by replica, in the plan's order
    widths: tuple[Width, ...]  # by replica
    copied: tuple[Room, ...] = ()  # whose images are written or read, in the plan's order


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


def surely_ends(request: Request, out: LaunchedRound | None) -> bool:
    """Whether the round that is out gives a resident its last token, however few it gives: one at least."""
    assert isinstance(request.state, Installed | Decoding)
    return part_in(request, out) is not None and request.state.progress.completion + 1 >= request.budget


def blocks_next(request: Request, shape: EngineShape, out: LaunchedRound | None) -> int:
    """Blocks that a resident holds when its next round is launched: up to the last row that this round may write, wherever the
    round that is out leaves it."""
    assert isinstance(request.state, Installed | Decoding)
    part = part_in(request, out)
    moved = 0 if part is None else part.width
    return blocks_for(request.state.progress.position + moved + shape.rows_ahead)


def part_in(request: Request, out: LaunchedRound | None) -> Width | None:
    """What the round that is out, the last one that was launched, does with a resident; None if it is not in it."""
    state = request.state
    if out is None or not isinstance(state, Decoding) or state.until not in (None, out.round_id):
        return None
    return out.widths[state.holding.replica]
