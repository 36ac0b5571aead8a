"""What happens to the decode planner and what it asks for in return. Frozen data that carries ids, never handles."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NewType

from services.contracts.ids import BlockId, BlockKey, GlobalRank, ImageBlock, Place, Replica, RequestId, Room, SlotId, Token
from services.contracts.lifecycle import State
from services.contracts.messages import Failure, Sampling
from services.contracts.placement import Manifest
from services.scheduler.decode.buckets import RoundMode
from services.scheduler.decode.widths import Width

Pair = NewType("Pair", int)  # one life of one prefill scheduler's stream; a reconnect is another
Client = NewType("Client", int)  # one Attach stream


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a drafter did for one request: windows verified, proposals in them and those accepted, whether or not the answer
    ended before them; and in how many windows the first k were, k from 1."""

    windows: int
    proposed: int
    accepted: int
    accepted_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that went well. The stop token is among the completion tokens."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token: Token | None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class ToldByPrefill:
    """The room ended before this engine had the request: the client hears it from P, and this stream just ends."""


End = Finished | ToldByPrefill | Failure


# ---- events: from the prefill scheduler
@dataclass(frozen=True, slots=True)
class PrefillPaired:
    """The pair check passed on all agents; what this pair sends counts from now until PrefillLost."""

    pair: Pair
    engine_id: str


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    pair: Pair
    request_id: RequestId
    room: Room
    attempt: int
    prompt_tokens: int
    prompt_hash: bytes
    sampling: Sampling
    timeout: float  # seconds left of the request's deadline; 0: the engine's default
    keys: tuple[BlockKey, ...] = field(default=(), repr=False)  # of the prompt's full blocks
    tail: tuple[Token, ...] = field(default=(), repr=False)  # its tokens behind them; empty if P names no blocks


@dataclass(frozen=True, slots=True)
class CancelRoom:
    """The room is over on P. Without `failure` the client cancelled it, or it ended with its first token."""

    pair: Pair
    room: Room
    reason: str
    failure: Failure | None = None
    finished_on_prefill: bool = False


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The stream of this pair broke."""

    pair: Pair
    reason: str


# ---- events: from this engine's agents
@dataclass(frozen=True, slots=True)
class AgentRankReady:
    """Every unit that this rank expects of the room is in its pools."""

    rank: GlobalRank
    room: Room
    attempt: int
    token: Token
    window: tuple[Token, ...]
    bytes: int
    first_byte: float  # seconds of the Unix clock
    last_byte: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class AgentRoomFailed:
    """The room is dead on this rank; AgentDrained follows."""

    rank: GlobalRank
    room: Room
    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class AgentDrained:
    """Nothing of the room touches this rank's pools any more."""

    rank: GlobalRank
    room: Room


# ---- events: from clients
@dataclass(frozen=True, slots=True)
class ClientAttached:
    client: Client
    request_id: RequestId
    room: Room


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The Attach stream ended, whoever ended it."""

    client: Client


@dataclass(frozen=True, slots=True)
class CancelRequested:
    request_id: RequestId
    reason: str


# ---- events: from the workers, and of the engine as a whole
@dataclass(frozen=True, slots=True)
class PlaceTokens:
    place: Place
    tokens: tuple[Token, ...]  # accepted in this round, at least one; the last is the new anchor
    window: tuple[Token, ...]  # the next window, anchor first


@dataclass(frozen=True, slots=True)
class RoundDone:
    round_id: int
    replicas: tuple[tuple[PlaceTokens, ...], ...]  # by replica, rows in the plan's order
    copied: tuple[Room, ...] = ()  # whose images all ranks have written or read, by replica, in the plan's order


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Admit nobody any more; Emptied follows when the last request is gone."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A worker or an agent is gone: no request of this engine can go on."""

    failure: Failure


# ---- made by the planner itself, for its table
@dataclass(frozen=True, slots=True)
class EndAsked:
    """A cancel, a deadline or a loss ends a request. Without a failure it was cancelled."""

    failure: Failure | None


# ---- effects: to the prefill scheduler
@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """Neither accepted nor failed: no room now, CapacityFreed follows."""

    pair: Pair
    room: Room
    accepted: bool
    replica: Replica | None = None
    failure: Failure | None = None
    proposals: int = 0  # worth drafting for its window
    prefix_tokens: int = 0  # need not be sent


@dataclass(frozen=True, slots=True)
class CapacityFreed:
    pair: Pair


@dataclass(frozen=True, slots=True)
class RoomInstalled:
    pair: Pair
    room: Room


@dataclass(frozen=True, slots=True)
class RoomEnded:
    pair: Pair
    room: Room
    failure: Failure | None


# ---- effects: to this engine's agents
@dataclass(frozen=True, slots=True)
class ExpectManifest:
    ranks: tuple[GlobalRank, ...]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CancelOnAgents:
    ranks: tuple[GlobalRank, ...]
    room: Room
    reason: str


# ---- effects: to clients
@dataclass(frozen=True, slots=True)
class PublishTokens:
    """One effect for all whom a round gave something."""

    said: tuple[tuple[Client, tuple[Token, ...]], ...]


@dataclass(frozen=True, slots=True)
class PublishEnd:
    """The last word on this stream."""

    client: Client
    end: End


# ---- effects: to the ledger, and of the engine as a whole
@dataclass(frozen=True, slots=True)
class WriteTransition:
    request_id: RequestId
    state: State
    attempt: int
    step: int
    fields: tuple[tuple[str, str | int | float], ...]


@dataclass(frozen=True, slots=True)
class Emptied:
    """Asked to drain, and no request is left."""


@dataclass(frozen=True, slots=True)
class LoseEngine:
    """Every request has been failed; the process is to end."""

    failure: Failure


Effect = (
    AnswerReserve | CapacityFreed | RoomInstalled | RoomEnded | ExpectManifest | CancelOnAgents
    | PublishTokens | PublishEnd | WriteTransition | Emptied | LoseEngine
)  # fmt: skip


# ---- the plan of one round
@dataclass(frozen=True, slots=True)
class PlaceInstall:
    """Before the round: the place holds this request."""

    place: Place
    room: Room
    blocks: tuple[BlockId, ...]  # the whole table
    slot: SlotId
    position: int  # of the anchor, whose rows are not in the cache yet
    window: tuple[Token, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class PlaceRetract:
    """The place's request goes to its image, and the place is empty."""

    place: Place
    room: Room
    position: int  # of its anchor: rows before it are what the image has
    image: tuple[ImageBlock, ...]  # its data blocks in order, then its KDA state


@dataclass(frozen=True, slots=True)
class PlaceRestore:
    """The place holds a request that comes back from its image, the first `found` blocks of its table excepted: they have
    their rows already."""

    install: PlaceInstall
    found: int
    image: tuple[ImageBlock, ...]


class ReplicaPlan(NamedTuple):
    """One replica's part, in the order in which it takes effect: clears, installs, the round's deltas, retracts, restores, then
    the live rows run. A block may be read by a retract and named in a delta or a restore, whose rows come after."""

    clears: tuple[Place, ...]
    installs: tuple[PlaceInstall, ...]
    live: tuple[Place, ...]
    width: Width
    retracts: tuple[PlaceRetract, ...] = ()
    restores: tuple[PlaceRestore, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    round_id: int
    bucket: int
    mode: RoundMode
    replicas: tuple[ReplicaPlan, ...]  # all of them, idle ones with no live rows
    deltas: Mapping[Replica, Mapping[Place, tuple[BlockId, ...]]]  # blocks that tables of live places grow by
