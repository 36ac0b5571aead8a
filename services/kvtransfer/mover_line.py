"""The line between an agent and its mover: orders one way, events the other, and what they are as bytes.

A Unix stream socket of [u32 length, little-endian][u8 kind][body] messages. The agent's first is `Open`, with the descriptors
of the worker's arenas on it, which Opened or Refused answers; then come orders and events in their order. The end of the
socket is the end of the other process.
"""

import socket
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3mesh.v1 import common_pb2
from services.contracts.messages import Failure
from services.kvtransfer.credits import FrameId
from services.kvtransfer.messages import Link, Receive, Received, Send, Sent
from services.kvtransfer.pieces import Piece, Units
from services.runtime import wire

HEAD = struct.Struct("<IB")
AT_ONCE = 1 << 18  # bytes
ARENAS_LIMIT = 16
STALL_S = 30  # that an agent may take to read


# ---- orders
@dataclass(frozen=True, slots=True)
class Open:
    """What the mover works on: the worker's export, and the sizes that the agent has chosen."""

    export: bytes  # LocalMessage
    frame_bytes: int
    frames: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Frames can go over the link from now on -> Connected. `tags`: link id and epoch, the high half of every tag."""

    link: Link
    tags: int
    address: bytes  # UCX's, of the peer


@dataclass(frozen=True, slots=True)
class Abort:
    """Fence the link: what is under way on it ends, and nothing of it is copied into the pools after -> Aborted."""

    link: Link


# ---- events
@dataclass(frozen=True, slots=True)
class Opened:
    address: bytes  # UCX's
    checksum: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The memory cannot be opened, or UCX cannot move it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Connected:
    link: Link
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    link: Link


@dataclass(frozen=True, slots=True)
class Troubled:
    """A step failed as none may: what the pools hold is unknown."""

    error: str


Order = Open | Connect | Abort | Send | Receive
Event = Opened | Refused | Connected | Aborted | Sent | Received | Troubled
KINDS: tuple[type, ...] = (Open, Connect, Abort, Send, Receive, Opened, Refused, Connected, Aborted, Sent, Received, Troubled)
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

OPEN = struct.Struct("<QII")
CONNECT = SEND = struct.Struct("<QQ")
RECEIVE = struct.Struct("<QQQ")
LINK = struct.Struct("<Q")
ENDS = struct.Struct("<QQ??")  # whose, which, flags


def pack(it: Order | Event) -> bytes:
    body = _pack(it)
    return HEAD.pack(len(body), NUMBERS[type(it)]) + body


def _pack(it: Order | Event) -> bytes:
    match it:
        case Send(link, seq, pieces):
            return SEND.pack(link, seq) + _pack_pieces(pieces)
        case Receive(frame, link, seq, pieces):
            return RECEIVE.pack(frame, link, seq) + _pack_pieces(pieces)
        case Sent(link, seq, error, peer_gone):
            return ENDS.pack(link, seq, error is None, peer_gone) + (error or "").encode()
        case Received(frame, intact, error, peer_gone):
            return ENDS.pack(frame, intact, error is None, peer_gone) + (error or "").encode()
        case Open(export, frame_bytes, frames, piece_bytes):
            return OPEN.pack(frame_bytes, frames, piece_bytes) + export
        case Connect(link, tags, address):
            return CONNECT.pack(link, tags) + address
        case Abort(link) | Aborted(link):
            return LINK.pack(link)
        case Connected(link, error):
            return ENDS.pack(link, 0, error is None, False) + (error or "").encode()
        case Opened(address, checksum, pinned):
            return struct.pack("<?B", pinned, len(checksum)) + checksum.encode() + address
        case Refused(failure):
            return wire.failure(failure).SerializeToString()
        case Troubled(error):
            return error.encode()


def _read(kind: type, body: memoryview) -> Order | Event:
    if kind is Send:
        link, seq = SEND.unpack_from(body)
        return Send(Link(link), seq, _read_pieces(body[SEND.size :]))
    if kind is Receive:
        frame, link, seq = RECEIVE.unpack_from(body)
        return Receive(FrameId(frame), Link(link), seq, _read_pieces(body[RECEIVE.size :]))
    if kind in (Sent, Received, Connected):
        whose, which, well, peer_gone = ENDS.unpack_from(body)
        error = None if well else str(body[ENDS.size :], "utf-8")
        if kind is Sent:
            return Sent(Link(whose), which, error, peer_gone)
        return Received(FrameId(whose), bool(which), error, peer_gone) if kind is Received else Connected(Link(whose), error)
    if kind is Open:
        return Open(bytes(body[OPEN.size :]), *OPEN.unpack_from(body))
    if kind is Connect:
        link, tags = CONNECT.unpack_from(body)
        return Connect(Link(link), tags, bytes(body[CONNECT.size :]))
    if kind in (Abort, Aborted):
        return kind(Link(*LINK.unpack(body)))
    if kind is Opened:
        end = 2 + body[1]
        return Opened(bytes(body[end:]), str(body[2:end], "utf-8"), bool(body[0]))
    if kind is Refused:
        return Refused(wire.read_failure(common_pb2.Failure.FromString(bytes(body))))
    return Troubled(str(body, "utf-8"))


def _pack_pieces(pieces: Sequence[Piece]) -> bytes:
    """As words: length and number of runs of each piece, then numbers of fields and ids, fields and ids of each run."""
    words: list[int] = []
    for piece in pieces:
        words += (piece.length, len(piece.units))
        for run in piece.units:
            words += (len(run.fields), len(run.ids), *run.fields, *run.ids)
    return array("I", words).tobytes()


def _read_pieces(body: memoryview) -> tuple[Piece, ...]:
    words = body.cast("I").tolist()
    pieces: list[Piece] = []
    at = 0
    while at < len(words):
        length, count = words[at], words[at + 1]
        at += 2
        runs: list[Units] = []
        for _ in range(count):
            fields = at + 2 + words[at]
            end = fields + words[at + 1]
            runs.append(Units(tuple(words[at + 2 : fields]), tuple(words[fields:end])))
            at = end
        pieces.append(Piece(tuple(runs), length))
    return tuple(pieces)


class Unpacker:
    """Messages out of what comes, however it is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Order | Event]:
        data = self._rest + data if self._rest else data
        view, at, found = memoryview(data), 0, list[Order | Event]()
        while len(data) - at >= HEAD.size:
            length, kind = HEAD.unpack_from(data, at)
            end = at + HEAD.size + length
            if end > len(data):
                break
            found.append(_read(KINDS[kind], view[at + HEAD.size : end]))
            at = end
        self._rest = data[at:]
        return found


class MoverEnd:
    """The mover's end of the socket. `over` once the agent's is closed."""

    def __init__(self, line: socket.socket):
        self._line, self._unpacker = line, Unpacker()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_S, 0))
        self.over = False

    @property
    def descriptor(self) -> int:
        return self._line.fileno()

    def opening(self) -> tuple[Open, list[int]] | None:
        """The agent's first order and the descriptors on it, or None if it ended before. Waits for it."""
        found: list[Order | Event] = []
        descriptors: list[int] = []
        while not found:
            data, fds, _, _ = socket.recv_fds(self._line, AT_ONCE, ARENAS_LIMIT)
            if not data:
                self.over = True
                return None
            descriptors += fds
            found = self._unpacker.feed(data)
        (first,) = found
        assert isinstance(first, Open), "the agent's first word"
        return first, descriptors

    def receive(self) -> Sequence[Order]:
        """What has come; waits for nothing."""
        try:
            data = self._line.recv(AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ()
        except ConnectionResetError:
            data = b""
        self.over = not data
        return self._unpacker.feed(data)  # pyright: ignore[reportReturnType] (it is the agent who speaks)

    def tell(self, events: Iterable[Event]) -> None:
        """OSError if the agent has not read for STALL_S."""
        self._line.sendall(b"".join(map(pack, events)))
