"""Request states and the transition table (spec scheduling §4). The state is written to Redis by its owner alone."""

from enum import StrEnum


class State(StrEnum):
    """Where a request is. The owner is in OWNER."""

    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    RESERVED = "RESERVED"
    BOOTSTRAPPING = "BOOTSTRAPPING"
    PREFILLING = "PREFILLING"
    TRANSFERRING = "TRANSFERRING"
    INSTALLED = "INSTALLED"
    DECODING = "DECODING"
    RETRACTING = "RETRACTING"
    RETRACTED = "RETRACTED"
    RESTORING = "RESTORING"
    FINISHING = "FINISHING"
    RELEASING = "RELEASING"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Owner(StrEnum):
    GATEWAY = "gateway"
    PREFILL = "prefill-scheduler"
    DECODE = "decode-scheduler"


TERMINAL = frozenset({State.FINISHED, State.ABORTED, State.FAILED, State.CANCELLED})

OWNER: dict[State, Owner] = {
    State.RECEIVED: Owner.GATEWAY,
    State.QUEUED: Owner.PREFILL,
    State.RESERVED: Owner.DECODE,
    State.BOOTSTRAPPING: Owner.PREFILL,
    State.PREFILLING: Owner.PREFILL,
    State.TRANSFERRING: Owner.PREFILL,
    State.INSTALLED: Owner.DECODE,
    State.DECODING: Owner.DECODE,
    State.RETRACTING: Owner.DECODE,
    State.RETRACTED: Owner.DECODE,
    State.RESTORING: Owner.DECODE,
    State.FINISHING: Owner.DECODE,
    State.RELEASING: Owner.PREFILL,
}

# What may follow what. FAILED and CANCELLED before a place on D is held need no RELEASING.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.RECEIVED: frozenset({State.QUEUED, State.FAILED, State.CANCELLED}),
    State.QUEUED: frozenset({State.RESERVED, State.FAILED, State.CANCELLED}),
    State.RESERVED: frozenset({State.BOOTSTRAPPING, State.RELEASING}),
    State.BOOTSTRAPPING: frozenset({State.PREFILLING, State.RELEASING}),
    State.PREFILLING: frozenset({State.TRANSFERRING, State.RELEASING}),
    State.TRANSFERRING: frozenset({State.INSTALLED, State.RELEASING, State.FINISHED}),
    State.INSTALLED: frozenset({State.DECODING, State.FINISHING}),
    State.DECODING: frozenset({State.RETRACTING, State.FINISHING}),
    State.RETRACTING: frozenset({State.RETRACTED, State.FINISHING}),
    State.RETRACTED: frozenset({State.RESTORING, State.FINISHING}),
    State.RESTORING: frozenset({State.DECODING, State.INSTALLED, State.FINISHING}),
    State.FINISHING: frozenset({State.FINISHED, State.ABORTED, State.FAILED, State.CANCELLED}),
    State.RELEASING: frozenset({State.FAILED, State.CANCELLED, State.QUEUED}),
}

# Two owners write one request's key, and their writes may reach Redis out of order (D installs while P's note of the
# last chunk is still on its way). So a write carries a version, RANK within an attempt, and Redis keeps the highest:
# the log gets every transition, the state never goes back, and a terminal state stays.
RANK: dict[State, int] = {
    State.RECEIVED: 0,
    State.QUEUED: 1,
    State.RESERVED: 2,
    State.BOOTSTRAPPING: 3,
    State.PREFILLING: 4,
    State.TRANSFERRING: 5,
    State.INSTALLED: 6,
    State.RELEASING: 6,
    State.DECODING: 7,
}  # D counts on from here, one for each transition


def may_follow(before: State, after: State) -> bool:
    """Whether the table admits `before` → `after`. An engine that is lost may end any request: FAILED is always legal."""
    if before in TERMINAL:
        return False
    return after is State.FAILED or after in TRANSITIONS[before]
