"""The live links of this agent and what goes over them: messages by gRPC, frames by UCX.

A frame's tag is link id (16 bit) | link epoch (16 bit) | sequence (32 bit). UCX matches tags over all peers of a process; the
D agent, which receives, gives out the ids and epochs, so no two frames that it awaits are alike.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

from k3mesh.errors import ConfigError, EngineLost, MeshError
from k3mesh.v1 import transfer_pb2, transfer_pb2_grpc
from services.contracts.placement import Placement, check_contract
from services.kvtransfer.frames import CacheMemory
from services.kvtransfer.link import Hello, PeerLink
from services.kvtransfer.messages import CloseLink, Link, LinkLost, LinkUp, Receive, Received, Send, Sent, ToPeer
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import Endpoint, Transport, TransportError
from services.runtime.telemetry import log

ABORT_S = 2.0


@dataclass(frozen=True, slots=True)
class Line:
    """A link that carries rooms, and its endpoint."""

    link: PeerLink
    endpoint: Endpoint
    tags: int


class Peers:
    """All lines of this agent. The effects of its session are methods."""

    def __init__(
        self, placement: Placement, limits: Limits, transport: Transport, memory: CacheMemory, post: Callable[[Any], None]
    ):
        self.placement, self.limits, self.transport, self.post = placement, limits, transport, post
        self._memory = memory
        self._numbers = count(1)
        self._lines: dict[Link, Line] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    def new_link(self) -> PeerLink:
        return PeerLink(Link(next(self._numbers)), self.limits.beat)

    def hello(self, link_id: int, link_epoch: int) -> Hello:
        frame_bytes, checksum = self.limits.frame_bytes, self._memory.checksum
        return Hello(self.placement, self.transport.address, link_id, link_epoch, frame_bytes, checksum)

    async def join(self, link: PeerLink, peer: Hello, link_id: int, link_epoch: int) -> None:
        """Frames can go over the link from now on. EngineLost if UCX does not reach the peer."""
        try:
            endpoint = await self.transport.connect(peer.ucx_address)
        except TransportError as error:
            raise EngineLost(f"{peer.placement.name} cannot be reached by UCX: {error}", detail="PD_PEER_DEAD") from error
        self._lines[link.number] = Line(link, endpoint, link_id << 48 | link_epoch << 32)

    def part(self, link: PeerLink) -> None:
        """The link is over: fence its endpoint. Sends and receives on it end by this."""
        line = self._lines.pop(link.number, None)
        if line is not None:
            self.post(LinkLost(link.number, link.ended.result(), link.gone))
            task = asyncio.ensure_future(line.endpoint.abort())
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """End all links, and give their endpoints a moment to come down."""
        for line in list(self._lines.values()):
            line.link.close("the agent ends")
            self.part(line.link)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_S)

    # ---- effects
    def tell(self, effect: ToPeer) -> None:
        if (line := self._lines.get(effect.link)) is not None:
            line.link.send(effect.message)

    def cut(self, effect: CloseLink) -> None:
        if (line := self._lines.get(effect.link)) is not None:
            log.warning("a link is cut", link=effect.link, reason=effect.reason)
            line.link.close(effect.reason)

    def send(self, effect: Send) -> Coroutine[Any, Any, Sent]:
        return self._send(effect, self._lines.get(effect.link))  # the line as it is now: it may be gone when the task runs

    def receive(self, effect: Receive) -> Coroutine[Any, Any, Received]:
        return self._receive(effect, self._lines.get(effect.link))

    async def _send(self, effect: Send, line: Line | None) -> Sent:
        if line is None:
            return Sent(effect.frame, "the link is lost")
        try:
            await line.endpoint.send(line.tags | effect.seq, self._memory.frame(effect.frame, effect.length))
        except TransportError as error:
            return Sent(effect.frame, str(error), error.peer_gone)
        return Sent(effect.frame)

    async def _receive(self, effect: Receive, line: Line | None) -> Received:
        if line is None:
            return Received(effect.frame, "the link is lost")
        try:
            await line.endpoint.receive(line.tags | effect.seq, self._memory.frame(effect.frame, effect.length))
        except TransportError as error:
            return Received(effect.frame, str(error), error.peer_gone)
        return Received(effect.frame)


class PeerService(transfer_pb2_grpc.TransferPeerServicer):
    """P's end of the links: decode agents dial in."""

    def __init__(self, peers: Peers):
        self._peers = peers

    async def Link(
        self, request_iterator: AsyncIterator[transfer_pb2.PeerMessage], context: Any
    ) -> AsyncIterator[transfer_pb2.PeerMessage]:
        source = aiter(request_iterator)
        link = self._peers.new_link()
        try:
            peer = await link.hear_hello(source)
            self._check(peer)
        except MeshError as error:
            log.warning("a link is refused", reason=error.message)
            link.close(error.message, refusal=error)
            async for message in link.outgoing():
                yield message
            return
        reader = None
        try:
            await self._peers.join(link, peer, peer.link_id, peer.link_epoch)
            self._peers.post(LinkUp(link.number, peer.placement))
            log.info("linked", link=link.number, peer=peer.placement.name, link_epoch=peer.link_epoch)
            link.say_hello(self._peers.hello(peer.link_id, peer.link_epoch))
            reader = asyncio.ensure_future(link.read(source, self._peers.post))
            async for message in link.outgoing():
                yield message
        finally:
            link.close("the stream ended")
            self._peers.part(link)
            log.info("unlinked", link=link.number, peer=peer.placement.name, reason=link.ended.result())
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader])

    def _check(self, peer: Hello) -> None:
        """What one stage can tell by itself; the pair check of all stages is D's. UCX does not survive an address that is
        none, so a stranger must not get as far as that."""
        own = self._peers.placement
        if own.role != "prefill":
            raise ConfigError(f"{own.name} is a {own.role} agent; decode agents link to prefill agents", detail="PD_CONTRACT")
        if peer.placement.role != "decode":
            raise ConfigError(
                f"{peer.placement.name} is a {peer.placement.role} agent and has no business with {own.name}; correct the "
                "addresses of the pair",
                detail="PD_CONTRACT",
            )
        check_contract(own, peer.placement)
        mine = self._peers.hello(peer.link_id, peer.link_epoch)
        if peer.checksum != mine.checksum:
            raise ConfigError(
                f"frames have checksums of kind {mine.checksum!r} on {own.name} and {peer.checksum!r} on "
                f"{peer.placement.name}; put the pools of both engines on CPUs (xxh3_64), or on GPUs (sum64)",
                detail="PD_CONTRACT",
            )
        if peer.frame_bytes < self._peers.limits.frame_bytes:
            raise ConfigError(
                f"frame_bytes is {self._peers.limits.frame_bytes} on {own.name} and {peer.frame_bytes} on "
                f"{peer.placement.name}; the decode side must take at least what the prefill side sends",
                detail="PD_CONTRACT",
            )
