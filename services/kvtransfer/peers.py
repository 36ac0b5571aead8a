"""The live links of this agent and what goes over them: messages by TCP, frames by UCX.

A frame's tag is link id (16 bit) | link epoch (16 bit) | sequence (32 bit). UCX matches tags over all peers of a process; the
D agent, which receives, gives out the ids and epochs, so no two frames that it awaits are alike.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from k3mesh.errors import ConfigError, EngineLost, MeshError
from services.contracts.flags import split_address
from services.contracts.placement import Placement, check_contract
from services.kvtransfer.link import Hello, PeerLink
from services.kvtransfer.messages import CloseLink, Link, LinkLost, LinkUp, ToPeer
from services.kvtransfer.mover import Mover
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import TransportError
from services.runtime.telemetry import log

ABORT_S = 2.0
LINKS_LIMIT = 1024  # a decode agent has one


class Peers:
    """All lines of this agent. The effects of its session are methods."""

    def __init__(
        self, placement: Placement, limits: Limits, ucx_address: bytes, checksum: str, mover: Mover, post: Callable[[Any], None]
    ):
        self.placement, self.limits, self.post = placement, limits, post
        self._ucx_address, self._checksum, self._mover = ucx_address, checksum, mover
        self._numbers = count(1)
        self._links: dict[Link, PeerLink] = {}  # that carry rooms
        self._aborts: set[asyncio.Task[None]] = set()

    def new_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerLink:
        return PeerLink(Link(next(self._numbers)), self.limits.beat, reader, writer)

    def hello(self, link_id: int, link_epoch: int) -> Hello:
        sizes = self.limits.frame_bytes, self.limits.piece_bytes
        return Hello(self.placement, self._ucx_address, link_id, link_epoch, *sizes, self._checksum)

    async def join(self, link: PeerLink, peer: Hello, link_id: int, link_epoch: int) -> None:
        """Frames can go over the link from now on. EngineLost if UCX does not reach the peer."""
        try:
            await self._mover.connect(link.number, peer.ucx_address, link_id << 48 | link_epoch << 32)
        except TransportError as error:
            raise EngineLost(f"{peer.placement.name} cannot be reached by UCX: {error}", detail="PD_PEER_DEAD") from error
        self._links[link.number] = link

    def part(self, link: PeerLink) -> None:
        """The link is over: fence its endpoint. Sends and receives on it end by this."""
        if self._links.pop(link.number, None) is not None:
            self.post(LinkLost(link.number, link.ended.result(), link.gone))
            task = asyncio.ensure_future(self._mover.abort(link.number))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """End all links, and give their endpoints a moment to come down."""
        for link in list(self._links.values()):
            link.close("the agent ends")
            self.part(link)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_S)

    # ---- effects
    def tell(self, effect: ToPeer) -> None:
        if (link := self._links.get(effect.link)) is not None:
            link.send(effect.message)

    def cut(self, effect: CloseLink) -> None:
        if (link := self._links.get(effect.link)) is not None:
            log.warning("a link is cut", link=effect.link, reason=effect.reason)
            link.close(effect.reason)


class PeerServer:
    """P's end of the links: decode agents dial in. `address` is where, once it is started."""

    def __init__(self, peers: Peers):
        self._peers = peers
        self._open: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, listen: str) -> None:
        """Listen on HOST:PORT, any free port if that is 0. ConfigError if that cannot be."""
        host, port = split_address(listen)
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise ConfigError(
                f"--peer-listen {listen}: cannot be listened on ({error.strerror or error}); choose a free port of this host",
                param="peer_listen",
            ) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """No new links; those that are open end."""
        self._server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= LINKS_LIMIT:
            log.warning("a link is refused", reason=f"{LINKS_LIMIT} are open")
            writer.close()
            return
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        link = self._peers.new_link(reader, writer)
        try:
            try:
                peer = await link.hear_hello()
                self._check(peer)
                await self._peers.join(link, peer, peer.link_id, peer.link_epoch)
            except MeshError as error:
                log.warning("a link is refused", reason=error.message)
                link.close(error.message, refusal=error)
                return
            self._peers.post(LinkUp(link.number, peer.placement))
            log.info("linked", link=link.number, peer=peer.placement.name, link_epoch=peer.link_epoch)
            link.say_hello(self._peers.hello(peer.link_id, peer.link_epoch))
            await link.read(self._peers.post)
            log.info("unlinked", link=link.number, peer=peer.placement.name, reason=link.ended.result())
        finally:
            link.close("the agent ends")
            self._peers.part(link)
            await link.leave()

    def _check(self, peer: Hello) -> None:
        """What one stage can tell by itself; the pair check of all stages is D's. UCX does not survive an address that is
        none, so a stranger must not get as far as that."""
        own = self._peers.placement
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
        if peer.piece_bytes != mine.piece_bytes:
            raise ConfigError(
                f"pieces of frames have {mine.piece_bytes} bytes on {own.name} and {peer.piece_bytes} on "
                f"{peer.placement.name}; run the same release on both engines",
                detail="PD_CONTRACT",
            )
        if peer.frame_bytes < self._peers.limits.frame_bytes:
            raise ConfigError(
                f"frame_bytes is {self._peers.limits.frame_bytes} on {own.name} and {peer.frame_bytes} on "
                f"{peer.placement.name}; the decode side must take at least what the prefill side sends",
                detail="PD_CONTRACT",
            )
