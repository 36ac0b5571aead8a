"""D's end of the links: dial every stage of a prefill engine, check the pair, hold it, and dial again when it is lost.

A pairing lives and dies as a whole, since every room needs every stage.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from k3mesh.errors import ConfigError, EngineLost, MeshError
from services.contracts.flags import split_address
from services.contracts.placement import pair_check
from services.kvtransfer.link import Hello, PeerLink
from services.kvtransfer.messages import Failure, Paired, PeerGone
from services.kvtransfer.peers import Peers
from services.runtime.telemetry import log

DIAL_S = 30.0  # for one pairing, from PairWith or from its loss
PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
CONNECT_S = 5.0
EPOCHS = 1 << 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prefill engine to pair with: its agents of our tensor-parallel rank, by stage."""

    engine_id: str
    engine_epoch: int
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """To the scheduler. Without a failure: paired."""

    wanted: Wanted
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Dialled:
    link: PeerLink
    peer: Hello


class Pairer:
    """Holds one pairing at a time; `pair` replaces it. `run` owns the work."""

    def __init__(self, peers: Peers, report: Callable[[Outcome], None]):
        self._peers, self._report = peers, report
        self._wanted: asyncio.Queue[Wanted] = asyncio.Queue()
        self._link_epoch = 0
        self._paired: Wanted | None = None

    def pair(self, wanted: Wanted) -> None:
        self._wanted.put_nowait(wanted)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            holding: asyncio.Task[None] | None = None
            while True:
                wanted = await self._wanted.get()
                if wanted == self._paired:
                    self._report(Outcome(wanted))
                    continue
                if holding is not None:
                    holding.cancel()
                    await asyncio.wait([holding])
                holding = group.create_task(self._hold(wanted))

    async def _hold(self, wanted: Wanted) -> None:
        """Pair, and again whenever the pairing is lost, until that takes longer than DIAL_S."""
        clock = asyncio.get_running_loop().time
        until, pause = clock() + DIAL_S, PAUSE_S
        while True:
            error = await self._live(wanted)
            if error is None:  # it stood, and was lost
                until, pause = clock() + DIAL_S, PAUSE_S
            else:
                self._peers.post(PeerGone(error.message))
                if isinstance(error, ConfigError) or clock() >= until:
                    log.error("not paired", engine=wanted.engine_id, reason=error.message)
                    self._report(Outcome(wanted, Failure.of(error)))
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _live(self, wanted: Wanted) -> MeshError | None:
        """One life of the pairing: None when it stood and was lost, else why it never stood."""
        self._link_epoch = (self._link_epoch + 1) % EPOCHS
        links: list[PeerLink] = []
        try:
            async with AsyncExitStack() as stack:
                try:
                    dialled = await self._dial_all(wanted, stack, links)
                    for link_id, it in enumerate(dialled):
                        await self._peers.join(it.link, it.peer, link_id, self._link_epoch)
                except MeshError as error:
                    for link in links:
                        link.close(error.message, refusal=error)
                    return error
                self._peers.post(Paired(tuple(it.link.number for it in dialled), tuple(it.peer.placement for it in dialled)))
                self._paired = wanted
                self._report(Outcome(wanted))
                log.info("paired", engine=wanted.engine_id, epoch=wanted.engine_epoch, link_epoch=self._link_epoch)
                lost = await self._carry(dialled)
                log.warning("pairing lost", engine=wanted.engine_id, link=lost.number, reason=lost.ended.result())
                return None
        finally:
            self._paired = None

    async def _dial_all(self, wanted: Wanted, stack: AsyncExitStack, links: list[PeerLink]) -> list[Dialled]:
        """Links to all stages, checked as a pair. EngineLost if one cannot be had now, ConfigError if the pair is wrong."""

        async def dial(link_id: int, address: str) -> Dialled:
            link = self._peers.new_link(*await _connect(address))
            links.append(link)
            stack.push_async_callback(self._leave, link)
            link.say_hello(self._peers.hello(link_id, self._link_epoch))
            peer = await link.hear_hello()
            found = (peer.placement.engine_id, peer.placement.engine_epoch)
            if found != (wanted.engine_id, wanted.engine_epoch):
                raise EngineLost(
                    f"the prefill agent at {address} is of {found[0]} in epoch {found[1]}, wanted was {wanted.engine_id} "
                    f"in epoch {wanted.engine_epoch}",
                    detail="PD_STALE",
                )
            return Dialled(link, peer)

        results = await asyncio.gather(*(dial(n, address) for n, address in enumerate(wanted.agents)), return_exceptions=True)
        dialled = [result for result in results if isinstance(result, Dialled)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        pair_check([it.peer.placement for it in dialled], self._peers.placement)
        return dialled

    async def _carry(self, dialled: Sequence[Dialled]) -> PeerLink:
        """Until the first link ends, by itself or by cancellation; the others end with it, and all endpoints are fenced."""
        readers = [asyncio.ensure_future(it.link.read(self._peers.post)) for it in dialled]
        try:
            await asyncio.wait([it.link.ended for it in dialled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost = next((it.link for it in dialled if it.link.ended.done()), dialled[0].link)
            for link in (lost, *(it.link for it in dialled)):
                link.close("another pairing takes its place" if link is lost else "another link of the pairing is lost")
                self._peers.part(link)
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
        return lost

    async def _leave(self, link: PeerLink) -> None:
        link.close("not needed any more")
        self._peers.part(link)
        await link.leave()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """EngineLost if nobody answers there."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(*split_address(address))
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {CONNECT_S:g} s"
        raise EngineLost(
            f"the prefill agent at {address} does not answer ({reason}); check that it runs", detail="PD_PEER_DEAD"
        ) from error
