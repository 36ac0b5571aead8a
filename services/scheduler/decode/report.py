"""What the ledger learns with each transition: the figures of a request's timeline, and how it ended."""

from k3mesh.errors import BY_CODE, Internal
from services.contracts.lifecycle import State
from services.scheduler.decode.capacity import Holding
from services.scheduler.decode.events import Failure, Finished
from services.scheduler.decode.request import Progress, Receiving, Request
from services.scheduler.decode.shape import EngineShape

Fields = tuple[tuple[str, str | int | float], ...]


def reserved(request: Request, shape: EngineShape, holding: Holding) -> Fields:
    return (
        ("room", request.room),
        ("attempt", request.asked.attempt),
        ("d_engine", shape.engine_id),
        ("d_epoch", shape.epoch),
        ("replica", holding.replica),
        ("blocks", len(holding.blocks)),
    )


def installed(request: Request, state: Receiving, now: float) -> Fields:
    """Seconds from the first byte to the last over all ranks of the replica; `waited` since the reservation."""
    arrivals = state.arrivals.values()
    moved = sum(ready.bytes for ready in arrivals)
    first, last = min(ready.first_byte for ready in arrivals), max(ready.last_byte for ready in arrivals)
    seconds = max(0.0, last - first)
    return (
        ("bytes", moved),
        ("first_byte", first),
        ("last_byte", last),
        ("transfer_seconds", round(seconds, 6)),
        ("gb_s", round(moved / seconds / 1e9, 4) if seconds else 0.0),
        ("waited_seconds", round(now - request.reserved_at, 6)),
    )


def ended(end: Finished | Failure, progress: Progress) -> tuple[State, Fields]:
    """The terminal state and its figures; seconds from the installation to the last token."""
    seconds = max(0.0, progress.last_token_at - progress.installed_at)
    decoded = progress.completion - 1  # the anchor came with the handoff
    figures: Fields = (
        ("rounds", progress.rounds),
        ("completion_tokens", progress.completion),
        ("seconds", round(seconds, 6)),
        ("tokens_per_s", round(decoded / seconds, 3) if seconds else 0.0),
    )
    if (drafts := progress.drafts()) is not None:
        figures += (
            ("windows", drafts.windows),
            ("drafted", drafts.proposed),
            ("accepted", drafts.accepted),
            ("accepted_at", ",".join(map(str, drafts.accepted_at))),
        )
    if isinstance(end, Finished):
        return State.FINISHED, (("reason", end.reason), *figures)
    state = {"cancelled": State.CANCELLED, "capacity_aborted": State.ABORTED}.get(end.code, State.FAILED)
    return state, (*failed(end), *figures)


def failed(failure: Failure) -> Fields:
    return (
        ("error", failure.code),
        ("err_type", BY_CODE.get(failure.code, Internal).statuses.http),
        ("detail", failure.detail),
        ("message", failure.message),
    )
