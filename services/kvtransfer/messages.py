"""What the sessions say and hear: messages of schedulers and peers, events of the shell, effects (pure).

Names and meanings of messages are those of transfer.proto; wire.py converts.
"""

from dataclasses import dataclass
from typing import NewType

from services.contracts.barriers import Handoff
from services.contracts.messages import Failure
from services.contracts.placement import Manifest, Placement
from services.kvtransfer.credits import FrameId
from services.kvtransfer.pieces import Piece

Room = int
Link = NewType("Link", int)  # one life of a stream to a peer agent; a reconnect is another


def transfer_failed(detail: str, message: str) -> Failure:
    return Failure("transfer_failed", message, detail)


# ---- either scheduler, either peer
@dataclass(frozen=True, slots=True)
class CancelRoom:
    room: Room
    reason: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    room: Room


# ---- agent -> scheduler
@dataclass(frozen=True, slots=True)
class RoomReady:
    room: Room
    attempt: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RankReady:
    room: Room
    attempt: int
    token: int
    window: tuple[int, ...]
    bytes: int
    first_byte: float  # seconds of the session's clock
    last_byte: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SourceReleased:
    room: Room
    bytes: int


@dataclass(frozen=True, slots=True)
class RoomFailed:
    room: Room
    attempt: int
    failure: Failure


# ---- agent <-> agent
@dataclass(frozen=True, slots=True)
class Offer:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class OfferReply:
    room: Room
    attempt: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` units of each of these fields of the sender's record, from manifest position `first` on; 0 and 1 for slot fields.
    A barrier covers many fields, so a request's cache is a few extents."""

    fields: tuple[int, ...]  # of one kind
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Frame:
    seq: int  # of its first piece; the others follow
    length: int  # bytes of its units
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class FrameBatch:
    room: Room
    attempt: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    room: Room
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageDone:
    room: Room
    attempt: int
    stage: int
    bytes: int
    frames: int
    slot_gen: int
    handoff: Handoff | None


@dataclass(frozen=True, slots=True)
class StageAck:
    room: Room
    attempt: int


PeerMessage = Offer | OfferReply | FrameBatch | Grant | StageDone | StageAck | CancelRoom | Drained
Report = RoomReady | RankReady | SourceReleased | RoomFailed | Drained
Command = Manifest | CancelRoom


# ---- events of the shell
@dataclass(frozen=True, slots=True)
class FromPeer:
    link: Link
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class LinkUp:
    """P: a decode agent has linked and the endpoint to it stands."""

    link: Link
    peer: Placement


@dataclass(frozen=True, slots=True)
class Paired:
    """D: all stages of a prefill engine are linked and the pair check has passed."""

    links: tuple[Link, ...]  # by stage
    stages: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Nothing more comes from this link. On D the pairing is lost with it. Rooms wait for the next link to the same life of
    the peer, unless it does not answer: it is `gone`."""

    link: Link
    reason: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class PeerGone:
    """D: a pairing that was lost could not be made again at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Nothing of the frame is read any more: its bytes are out, or never will be."""

    link: Link
    seq: int
    error: str | None = None
    peer_gone: bool = False  # the error is the link's


@dataclass(frozen=True, slots=True)
class Received:
    """Nothing is written any more, to the frame's staging memory or to its units. `intact`: every seal was right, and all units
    are in the pools. A piece whose seal is wrong has touched none of its units."""

    frame: FrameId
    intact: bool = True
    error: str | None = None
    peer_gone: bool = False


# ---- effects
@dataclass(frozen=True, slots=True)
class ToPeer:
    link: Link
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class ToScheduler:
    report: Report


@dataclass(frozen=True, slots=True)
class Send:
    """Copy the units of a frame out of the pools, piece by piece, and send them -> Sent."""

    link: Link
    seq: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the pieces of a frame, and copy each into the pools if its seal is right -> Received."""

    frame: FrameId
    link: Link
    seq: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Give the link up: abort its endpoint, which ends every Send and Receive on it -> LinkLost."""

    link: Link
    reason: str


Effect = ToPeer | ToScheduler | Send | Receive | CloseLink
