"""What a round has the workers copy between cache and host memory, and what it tells them of a request at its place."""

from collections.abc import Iterable

from services.scheduler.decode.events import PlaceInstall, PlaceRestore, PlaceRetract
from services.scheduler.decode.request import Decoding, Request, Restoring, Retracting


def is_due(request: Request) -> bool:
    """Whether the next round is to copy its image."""
    return isinstance(request.state, Retracting | Restoring) and request.state.round_id is None


def copies(suspended: Iterable[Request], round_id: int) -> tuple[tuple[PlaceRetract, ...], tuple[PlaceRestore, ...]]:
    """What the workers are to copy in this round; afterwards it is under way."""
    retracts: list[PlaceRetract] = []
    restores: list[PlaceRestore] = []
    for request in suspended:
        match request.state:
            case Retracting(round_id=None) as state:
                retracts.append(PlaceRetract(state.holding.place, request.room, state.progress.position, state.image.blocks))
            case Restoring(round_id=None) as state:
                restores.append(PlaceRestore(install_of(request, state), state.holding.found, state.image.blocks))
            case _:
                continue
        state.round_id = round_id
    return tuple(retracts), tuple(restores)


def install_of(request: Request, state: Decoding | Restoring) -> PlaceInstall:
    """What the workers need to know of a request that they do not know yet."""
    holding, progress = state.holding, state.progress
    return PlaceInstall(
        place=holding.place,
        room=request.room,
        blocks=tuple(holding.blocks),
        slot=holding.slot,
        position=progress.position,
        window=progress.window,
        sampling=request.asked.sampling,
    )
