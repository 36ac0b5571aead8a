"""One life of the line between two agents: messages out in order, messages in, heartbeats, and one end.

A TCP connection of [u32 length, little-endian][PeerMessage] frames, which the D agent opens and the P agent accepts. A request
takes eight messages on it, each waited for by a GPU; a gRPC stream costs five times as much processor time for one.
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from k3mesh.errors import ConfigError, EngineLost, MeshError
from k3mesh.v1 import transfer_pb2
from services.contracts.placement import Placement
from services.kvtransfer import wire
from services.kvtransfer.messages import FromPeer, Link, PeerMessage
from services.runtime import channels
from services.runtime.telemetry import log
from services.runtime.wire import placement, read_placement

LENGTH = struct.Struct("<I")
MESSAGE_LIMIT, UNSENT_LIMIT = 16 << 20, 64 << 20  # bytes
MISSED_BEATS = 2
HELLO_S = 10.0
FAREWELL_S = 1.0  # for the last words of a link


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is at the other end and how to reach it by UCX."""

    placement: Placement
    ucx_address: bytes
    link_id: int
    link_epoch: int
    frame_bytes: int
    piece_bytes: int
    checksum: str  # of pieces


class PeerLink:
    """The line as both ends see it. `ended` holds the reason once it is over, `gone` whether it is the peer's silence."""

    def __init__(self, number: Link, beat: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """`beat`: seconds of silence before a heartbeat is sent, and after which one is missed."""
        self.number = number
        self._beat, self._reader, self._writer = beat, reader, writer
        self.gone = False
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._said: list[transfer_pb2.PeerMessage] = []  # in this turn of the loop
        self._beats = 0
        self._next_beat = self._loop.call_later(beat, self._heartbeat)

    def say_hello(self, hello: Hello) -> None:
        self._write(
            transfer_pb2.PeerMessage(
                hello=transfer_pb2.PeerHello(
                    placement=placement(hello.placement),
                    ucx_address=hello.ucx_address,
                    link_id=hello.link_id,
                    link_epoch=hello.link_epoch,
                    frame_bytes=hello.frame_bytes,
                    piece_bytes=hello.piece_bytes,
                    checksum=hello.checksum,
                )
            )
        )

    def send(self, message: PeerMessage) -> None:
        """What is said in one turn of the loop goes as one message."""
        if not self.ended.done():
            if not self._said:
                self._loop.call_soon(self._flush)
            self._said.append(wire.peer_message(message))

    def close(self, reason: str, refusal: MeshError | None = None) -> None:
        """End the link; what was said still goes out, and the refusal as the last word."""
        if not self.ended.done():
            self._flush()
            if refusal is not None:
                self._write(transfer_pb2.PeerMessage(refused=channels.failure(refusal)))
            self._next_beat.cancel()
            self.ended.set_result(reason)
            self._writer.close()

    async def leave(self) -> None:
        """Give what was said a moment to go out, then let the connection go. After `close`."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    async def hear_hello(self) -> Hello:
        """The peer's first message. EngineLost if it does not come, ConfigError if it is another."""
        try:
            async with asyncio.timeout(HELLO_S):
                message = await self._hear()
        except TimeoutError:
            raise EngineLost(f"the peer agent said nothing for {HELLO_S:g} s", detail="PD_PEER_DEAD") from None
        except OSError as error:
            raise EngineLost(f"the link broke before the peer agent said hello: {error}", detail="PD_PEER_DEAD") from error
        if message is None:
            raise EngineLost("the peer agent closed the link before it said hello", detail="PD_PEER_DEAD")
        if message.WhichOneof("message") == "refused":
            raise channels.error(message.refused)
        if message.WhichOneof("message") != "hello":
            raise ConfigError("the first message of a link is PeerHello; run the same release on both engines")
        hello = message.hello
        return Hello(
            read_placement(hello.placement),
            hello.ucx_address,
            hello.link_id,
            hello.link_epoch,
            hello.frame_bytes,
            hello.piece_bytes,
            hello.checksum,
        )

    async def read(self, deliver: Callable[[FromPeer], None]) -> None:
        """Hand every message on until the link ends, from either side or by silence. Ends it, and never raises."""
        reason = "the peer closed it"
        try:
            while not self.ended.done():
                async with asyncio.timeout(self._beat * (MISSED_BEATS + 0.5)):
                    message = await self._hear()
                if message is None:
                    break
                kind = message.WhichOneof("message")
                if kind == "refused":
                    reason = message.refused.message
                    break
                for it in message.bundle.messages if kind == "bundle" else (message,):
                    if it.WhichOneof("message") != "heartbeat":
                        deliver(FromPeer(self.number, wire.read_peer_message(it)))
        except TimeoutError:
            self.gone = not self.ended.done()
            reason = f"{MISSED_BEATS} heartbeats missed"
        except OSError as error:
            reason = f"{error}"
        except asyncio.CancelledError:
            reason = "cut"
            raise
        except Exception as error:
            log.error("reading a link failed", link=self.number, exc_info=error)
            reason = repr(error)
        finally:
            self.close(reason)

    async def _hear(self) -> transfer_pb2.PeerMessage | None:
        """The next message, or None at the end. ConfigError if what comes is none."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MESSAGE_LIMIT:
                raise ConfigError(f"a message of {length} bytes is announced; the limit is {MESSAGE_LIMIT}")
            return transfer_pb2.PeerMessage.FromString(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return None
        except DecodeError as error:
            raise ConfigError(f"what was received is no PeerMessage ({error}); run the same release on both engines") from None

    def _flush(self) -> None:
        said, self._said = self._said, []
        if said and not self.ended.done():
            bundle = transfer_pb2.Bundle(messages=said)
            self._write(said[0] if len(said) == 1 else transfer_pb2.PeerMessage(bundle=bundle))

    def _write(self, message: transfer_pb2.PeerMessage) -> None:
        data = message.SerializeToString()
        self._writer.write(LENGTH.pack(len(data)) + data)
        if self._writer.transport.get_write_buffer_size() > UNSENT_LIMIT:
            self._writer.transport.abort()  # the reader sees the end

    def _heartbeat(self) -> None:
        self._beats += 1
        self._write(transfer_pb2.PeerMessage(heartbeat=transfer_pb2.Heartbeat(sequence=self._beats)))
        self._next_beat = self._loop.call_later(self._beat, self._heartbeat)
