"""What happens to the prefill planner and what it asks for in return. Frozen data that carries ids, never handles."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.contracts.ids import NULL_SLOT, BlockId, BlockKey, GlobalRank, Replica, RequestId, Room, SlotId, Token
from services.contracts.lifecycle import State
from services.contracts.messages import Failure, Sampling

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Finished:
    """The first token was the last one."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    stop_token: Token | None


# ---- events: from clients
@dataclass(frozen=True, slots=True)
class RequestArrived:
    """The prompt itself stays with the service: the planner counts its tokens."""

    request_id: RequestId
    prompt_tokens: int
    sampling: Sampling
    timeout: float  # seconds that the request may take
    keys: tuple[BlockKey, ...] = field(default=(), repr=False)  # of its full blocks; none without a prefix cache


@dataclass(frozen=True, slots=True)
class CancelRequested:
    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Admit nobody any more; Emptied follows when the last request is gone."""


# ---- events: from the decode scheduler
@dataclass(frozen=True, slots=True)
class DecodeConnected:
    engine_id: str
    engine_epoch: int
    max_request_tokens: int  # one request on one replica, prompt and answer


@dataclass(frozen=True, slots=True)
class DecodeLost:
    reason: str


@dataclass(frozen=True, slots=True)
class ReserveAnswered:
    """Neither accepted nor failed: no place now, CapacityFreed follows."""

    room: Room
    accepted: bool
    replica: Replica
    prefix_tokens: int  # what D already holds
    proposals: int  # that D would verify
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CapacityFreed:
    """A refused reservation is worth trying again."""


@dataclass(frozen=True, slots=True)
class RoomInstalled:
    """The request is the decode engine's now."""

    room: Room


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """Nothing of the room is left on D. Without `failure` it ended because it was cancelled."""

    room: Room
    failure: Failure | None = None


# ---- events: from this engine's agents
@dataclass(frozen=True, slots=True)
class RoomReady:
    """The agent has the manifest and accepts it."""

    rank: GlobalRank
    room: Room


@dataclass(frozen=True, slots=True)
class RoomFailed:
    """The room is dead on this rank; Drained follows when nothing touches its memory."""

    rank: GlobalRank
    room: Room
    failure: Failure


@dataclass(frozen=True, slots=True)
class SourceReleased:
    """D has every byte that this rank holds of the room."""

    rank: GlobalRank
    room: Room
    bytes: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of the room is in flight on this rank any more."""

    rank: GlobalRank
    room: Room


RoomEvent = ReserveAnswered | RoomInstalled | RoomEnded | RoomReady | RoomFailed | SourceReleased | Drained


# ---- events: from the workers, and of the engine as a whole
@dataclass(frozen=True, slots=True)
class FirstToken:
    room: Room
    token: Token


@dataclass(frozen=True, slots=True)
class StepDone:
    """One stage has run a step. The last stage names a first token for each prompt that ended in it."""

    step_id: int
    stage: int
    started: float  # seconds of the Unix clock, of the stage's own compute
    ended: float
    first_tokens: tuple[FirstToken, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A worker or an agent is gone: no request of this engine can go on."""

    failure: Failure


# ---- effects: to the decode scheduler
@dataclass(frozen=True, slots=True)
class Reserve:
    request_id: RequestId
    room: Room
    attempt: int
    prompt_tokens: int
    sampling: Sampling
    timeout: float  # seconds left of the request's deadline
    keys: tuple[BlockKey, ...] = field(default=(), repr=False)  # of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class CancelOnDecode:
    """Without `failure` the client cancelled, or the request ended here, or it will be tried again."""

    room: Room
    reason: str
    failure: Failure | None = None
    finished_on_prefill: bool = False


@dataclass(frozen=True, slots=True)
class DropDecode:
    """The decode scheduler does not answer: break with it, and start anew."""

    reason: str


# ---- effects: to this engine's agents and workers
@dataclass(frozen=True, slots=True)
class CancelOnAgents:
    ranks: tuple[GlobalRank, ...]
    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetRooms:
    """The workers drop the rooms' block tables, in order with the steps."""

    rooms: tuple[Room, ...]


# ---- effects: to clients
@dataclass(frozen=True, slots=True)
class PublishQueued:
    request_id: RequestId
    position: int


@dataclass(frozen=True, slots=True)
class PublishAttached:
    request_id: RequestId
    room: Room


@dataclass(frozen=True, slots=True)
class PublishTokens:
    request_id: RequestId
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class PublishFinished:
    request_id: RequestId
    finished: Finished


@dataclass(frozen=True, slots=True)
class PublishFailure:
    request_id: RequestId
    failure: Failure


@dataclass(frozen=True, slots=True)
class PublishHandedOver:
    request_id: RequestId


# ---- effects: to the ledger, and of the service as a whole
@dataclass(frozen=True, slots=True)
class WriteTransition:
    request_id: RequestId
    state: State
    attempt: int
    step: int
    fields: Mapping[str, Value] = field(default_factory=dict[str, Value])
    owner: str = ""  # the engine that has the request from now on; ours if it is empty


@dataclass(frozen=True, slots=True)
class RequestGone:
    """Nothing of the request is left here: its prompt may go, its id is free."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Emptied:
    """Asked to drain, and no request is left."""


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """`reason`: why no new requests are taken; empty when they are again."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoseEngine:
    """Every request has been failed; the process is to end."""

    failure: Failure


Effect = (
    Reserve | CancelOnDecode | DropDecode | CancelOnAgents | ForgetRooms
    | PublishQueued | PublishAttached | PublishTokens | PublishFinished | PublishFailure | PublishHandedOver
    | WriteTransition | RequestGone | Emptied | HealthChanged | LoseEngine
)  # fmt: skip


# ---- the plan of one step
@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Prompt positions [start, end) of one request."""

    request_id: RequestId
    room: Room
    start: int
    end: int
    last: bool  # the prompt ends here
    new_blocks: tuple[BlockId, ...]  # appended to the request's block table
    slot: SlotId
    sampling: Sampling
    prefix_tokens: int  # what D already holds: not sent
    proposals: int  # to be drafted behind the prompt
    load_slot: SlotId = NULL_SLOT  # a checkpoint to start from, copied to `slot` before the step
    save_slot: SlotId = NULL_SLOT  # where the state at `end` is copied after it


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One batch through every stage. `transitions` are of the prompts that start with it."""

    step_id: int
    rows: tuple[ChunkRow, ...]
    transitions: tuple[WriteTransition, ...] = ()
