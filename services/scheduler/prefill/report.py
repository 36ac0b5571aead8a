"""What the ledger learns with each transition: the figures of a request's timeline, and how it ended. Durations are in
seconds; chunk times are seconds of the Unix clock, as the stages measured them."""

import json

from k3mesh.errors import BY_CODE, Internal
from services.scheduler.prefill.events import DecodeConnected, Failure, Finished, Value
from services.scheduler.prefill.request import Request

Fields = dict[str, Value]


def queued(request: Request) -> Fields:
    return {
        "attempt": request.attempt,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.sampling.max_tokens,
        "timeout_seconds": _seconds(request.deadline - request.arrived),
    }


def reserved(request: Request, decode: DecodeConnected) -> Fields:
    return {
        "attempt": request.attempt,
        "room": request.room,
        "replica": request.replica,
        "prefix_tokens": request.prefix_tokens,
        "d_engine": decode.engine_id,
        "d_epoch": decode.engine_epoch,
        "queued_seconds": _seconds(request.timeline.reserved - request.timeline.queued),
    }


def started(request: Request) -> Fields:
    """All ranks were ready `ready_seconds` after the reservation; the first chunk went `held_seconds` later, behind what was
    found in the prefix cache."""
    timeline = request.timeline
    return {
        "ready_seconds": _seconds(timeline.ready - timeline.reserved),
        "held_seconds": _seconds(timeline.started - timeline.ready),
        "cached_tokens": request.cached_tokens,
    }


def prefilled(request: Request) -> Fields:
    """`chunks`: JSON list of [stage, chunk start, chunk end, started, ended]."""
    timeline = request.timeline
    chunks = [[*chunk[:3], *map(_seconds, chunk[3:])] for chunk in timeline.chunks]
    return {
        "prefill_seconds": _seconds(timeline.prefilled - timeline.started),
        "chunks": json.dumps(chunks, separators=(",", ":")),
    }


def finished(request: Request, end: Finished) -> Fields:
    return {"reason": end.reason, "completion_tokens": 1, "seconds": _seconds(request.timeline.prefilled - request.arrived)}


def released(request: Request, now: float) -> Fields:
    """D has it all: what it took from here, over all ranks."""
    return {"bytes_sent": request.timeline.bytes, "released_seconds": _seconds(now - request.timeline.prefilled)}


def ended(request: Request) -> Fields:
    """Why an attempt is given up; without a failure it was for want of blocks, or is tried again."""
    failure = request.failure
    if failure is None:
        return {"attempt": request.attempt, "message": "another attempt follows"}
    return {
        "error": failure.code,
        "err_type": BY_CODE.get(failure.code, Internal).statuses.http,
        "detail": failure.detail,
        "message": failure.message,
    }


def out_of_time(request: Request) -> Failure:
    state, timeout = request.phase.name.lower(), request.deadline - request.arrived
    return Failure(
        "deadline_exceeded",
        f"{request.request_id} was {state} when its {timeout:g} s were up; allow more time, or try again when less is going on",
    )


def _seconds(value: float) -> float:
    return round(value, 6)
