"""One life of the stream between two agents: messages out in order, messages in, heartbeats, and one end.

gRPC gives both ends the same shape: an iterator that we read, and one that we are read by. The D agent dials
(`TransferPeer.Link`), the P agent serves.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from k3mesh.errors import ConfigError, EngineLost, MeshError
from k3mesh.v1 import transfer_pb2
from services.contracts.placement import Placement
from services.kvtransfer import wire
from services.kvtransfer.messages import FromPeer, Link, PeerMessage
from services.runtime import channels
from services.runtime.telemetry import log
from services.runtime.wire import placement, read_placement

MISSED_BEATS = 2
HELLO_S = 10.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is at the other end and how to reach it by UCX."""

    placement: Placement
    ucx_address: bytes
    link_id: int
    link_epoch: int
    frame_bytes: int
    checksum: str  # of frames


class PeerLink:
    """The stream as both ends see it. `ended` holds the reason once it is over, `gone` whether it is the peer's silence."""

    def __init__(self, number: Link, beat: float):
        """`beat`: seconds of silence before a heartbeat is sent, and after which one is missed."""
        self.number = number
        self._beat = beat
        self.gone = False
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._out: asyncio.Queue[transfer_pb2.PeerMessage | None] = asyncio.Queue()
        self._said: list[transfer_pb2.PeerMessage] = []  # in this turn of the loop

    def say_hello(self, hello: Hello) -> None:
        self._out.put_nowait(
            transfer_pb2.PeerMessage(
                hello=transfer_pb2.PeerHello(
                    placement=placement(hello.placement),
                    ucx_address=hello.ucx_address,
                    link_id=hello.link_id,
                    link_epoch=hello.link_epoch,
                    frame_bytes=hello.frame_bytes,
                    checksum=hello.checksum,
                )
            )
        )

    def send(self, message: PeerMessage) -> None:
        """What is said in one turn of the loop goes as one message: gRPC's cost is one for each, and high."""
        if not self.ended.done():
            if not self._said:
                asyncio.get_running_loop().call_soon(self._flush)
            self._said.append(wire.peer_message(message))

    def _flush(self) -> None:
        said, self._said = self._said, []
        if said:
            bundle = transfer_pb2.Bundle(messages=said)
            self._out.put_nowait(said[0] if len(said) == 1 else transfer_pb2.PeerMessage(bundle=bundle))

    def close(self, reason: str, refusal: MeshError | None = None) -> None:
        """End the link; what is queued still goes out, and the refusal as the last word."""
        if not self.ended.done():
            self._flush()
            if refusal is not None:
                self._out.put_nowait(transfer_pb2.PeerMessage(refused=channels.failure(refusal)))
            self.ended.set_result(reason)
            self._out.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[transfer_pb2.PeerMessage]:
        """What gRPC sends: the queue, and a heartbeat where it is silent."""
        beats = 0
        while True:
            try:
                async with asyncio.timeout(self._beat):
                    message = await self._out.get()
            except TimeoutError:
                beats += 1
                message = transfer_pb2.PeerMessage(heartbeat=transfer_pb2.Heartbeat(sequence=beats))
            if message is None:
                return
            yield message

    async def hear_hello(self, source: AsyncIterator[transfer_pb2.PeerMessage]) -> Hello:
        """The peer's first message. EngineLost if it does not come, ConfigError if it is another."""
        try:
            async with asyncio.timeout(HELLO_S):
                message = await anext(source, None)
        except TimeoutError:
            raise EngineLost(f"the peer agent said nothing for {HELLO_S:g} s", detail="PD_PEER_DEAD") from None
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
            hello.checksum,
        )

    async def read(self, source: AsyncIterator[transfer_pb2.PeerMessage], deliver: Callable[[FromPeer], None]) -> None:
        """Hand every message on until the link ends, from either side or by silence. Ends it, and never raises."""
        reason = "the peer closed it"
        try:
            while not self.ended.done():
                async with asyncio.timeout(self._beat * (MISSED_BEATS + 0.5)):
                    message = await anext(source, None)
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
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            reason = "cut"
            raise
        except Exception as error:
            log.error("reading a link failed", link=self.number, exc_info=error)
            reason = repr(error)
        finally:
            self.close(reason)
