"""The rules of retraction (spec scheduling §3.5, §3.6): who is suspended when blocks run out, and when a suspended request
fits again. What happens to those requests is in suspended.py."""

from collections.abc import Iterable, Sequence

from services.contracts.geometry import blocks_for
from services.contracts.ids import BlockKey
from services.scheduler.decode.capacity import Load, Pool, growth
from services.scheduler.decode.request import Decoding, Progress, Request
from services.scheduler.prefix import held

MOST_RETRACTIONS = 3  # of one request; afterwards it stays as long as anybody can go on


def data_blocks(progress: Progress) -> int:
    """Blocks with rows that count, the last partial one among them."""
    return blocks_for(progress.position)


def victims(residents: Iterable[Request], blocked: Request, lacking: int, standstill: bool) -> list[Request]:
    """Who may be suspended so that `blocked` gets the blocks it lacks, the best first: who releases most, then who has fewest
    tokens, then the youngest. At a standstill, when nobody on the replica can go on, those who have had enough too.

    The caller names residents none of whose rounds is out.
    """
    candidates: list[tuple[tuple[int, int, int], Request]] = []
    for request in residents:
        state = request.state
        if request is blocked or not isinstance(state, Decoding) or exempt(request, state.progress, standstill):
            continue
        released = state.holding.released
        if released >= lacking:
            candidates.append(((-released, state.progress.completion, -state.progress.order), request))
    return [request for _, request in sorted(candidates, key=_first)]


def exempt(request: Request, progress: Progress, standstill: bool = False) -> bool:
    """Who came in with room for all that it may still say keeps it; who has just come back gets a round; who was suspended
    often enough stays."""
    return request.covered or progress.unmoved or (request.retractions >= MOST_RETRACTIONS and not standstill)


def newest_that_helps(residents: Sequence[Request], blocked: Request, lacking: int) -> Request:
    """Who ends where nobody can be suspended: the newest resident, unless `blocked` could use nothing of it."""
    return next(it for it in reversed(residents) if it is blocked or it.state.holding.released >= lacking)  # pyright: ignore


def fits(pool: Pool, promised: int, progress: Progress, remaining: int, keys: Sequence[BlockKey], rows: int) -> int | None:
    """Blocks with which a suspended request may come back now, those of its next round among them; None if it must wait. Asked
    like a newcomer: who is there keeps what it was promised, so that no return suspends anybody."""
    blocks = blocks_for(progress.position + rows)
    ahead = growth(progress.position, remaining, rows, blocks)
    found = pool.cache.find(keys)
    return blocks if Load(pool, promised, found=len(found), shared=held(found)).admits(blocks + ahead) else None


def _first(pair: tuple[tuple[int, int, int], Request]) -> tuple[int, int, int]:
    return pair[0]
