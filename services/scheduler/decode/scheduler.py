"""A decode engine that is up: the planner in its shell, and who carries its effects."""

import asyncio
from typing import Any

from k3mesh.errors import EngineLost
from services.contracts.ids import RequestId
from services.runtime.ledger import Ledger, Value
from services.runtime.shell import Shell
from services.runtime.telemetry import log
from services.scheduler.decode import events as ev
from services.scheduler.decode.clients import Clients
from services.scheduler.decode.fleet import Fleet
from services.scheduler.decode.pairing import Prefills
from services.scheduler.decode.planner import DecodePlanner


class DecodeScheduler:
    """Wires the parts together. `run` until the engine is lost, `drain` before an orderly end."""

    def __init__(self, fleet: Fleet, ledger: Ledger, client_address: str):
        self.planner = DecodePlanner(fleet.shape())
        self.shell = Shell(self.planner)
        self.clients = Clients(self.shell.post)
        self.prefills = Prefills(self.shell.post, fleet, self.planner.shape, client_address)
        self._fleet, self._ledger = fleet, ledger
        self._emptied = asyncio.Event()
        self._stopping = False
        self._lost: asyncio.Future[ev.Failure] = asyncio.get_running_loop().create_future()
        self.shell.launch = fleet.launch
        carriers: dict[type, Any] = {
            ev.AnswerReserve: self.prefills.send,
            ev.CapacityFreed: self.prefills.send,
            ev.RoomInstalled: self.prefills.send,
            ev.RoomEnded: self.prefills.send,
            ev.ExpectManifest: fleet.expect,
            ev.CancelOnAgents: fleet.cancel,
            ev.PublishTokens: self.clients.tokens,
            ev.PublishEnd: self.clients.end,
            ev.WriteTransition: self._write,
            ev.Emptied: lambda _: self._emptied.set(),
            ev.LoseEngine: self._lose,
        }
        for effect, carrier in carriers.items():
            self.shell.on(effect, carrier)

    async def run(self) -> None:
        """Until stop(). EngineLost when the engine is lost, once everyone who waits was told."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.shell.run()),
                group.create_task(self._drive_fleet()),
                group.create_task(self._hear_cancels()),
                group.create_task(self._keep_lease()),
            ]
            failure = await self._lost
            for task in tasks:
                task.cancel()
        self.prefills.close()
        self.clients.close()
        if not self._stopping:
            raise EngineLost(failure.message, detail=failure.detail or failure.code)

    def stop(self) -> None:
        """End now; whoever is still here is told so."""
        self._stopping = True
        message = f"decode engine {self.planner.shape.engine_id} was shut down; try again later"
        self.shell.post(ev.EngineFailed(ev.Failure(EngineLost.code, message)))

    async def drain(self, timeout: float) -> int:
        """Admit nobody any more and wait for those who are here -> how many are left when the time is up."""
        self._emptied.clear()
        self.shell.post(ev.DrainAsked())
        try:
            async with asyncio.timeout(timeout):
                await self._emptied.wait()
        except TimeoutError:
            log.warning("drained in part", **self.planner.counters())
        return self.planner.requests

    def describe(self) -> dict[str, Value]:
        """The engine's entry in the ledger."""
        shape, counters = self.planner.shape, self.planner.counters()
        unhealthy = self.planner.alarm.reason(self.shell.clock.now())
        return {
            "role": "decode",
            "epoch": shape.epoch,
            "health": "draining" if self.planner.draining else unhealthy or ("ready" if len(self.prefills) else "unpaired"),
            "replicas": shape.replicas,
            "places": shape.places * shape.replicas,
            "blocks": (shape.num_blocks - 1) * shape.replicas,
            "image_blocks": shape.image_blocks * shape.replicas,
            **counters,
            **self.planner.cache(),
        }

    async def _drive_fleet(self) -> None:
        try:
            await self._fleet.run(self.shell.post)
        except EngineLost as error:
            self.shell.post(ev.EngineFailed(ev.Failure.of(error)))

    async def _hear_cancels(self) -> None:
        async for request_id in self._ledger.cancels():
            self.shell.post(ev.CancelRequested(RequestId(request_id), "asked for in the ledger"))

    async def _keep_lease(self) -> None:
        await self._ledger.lease_lost.wait()
        message = f"another scheduler took the lease of {self.planner.shape.engine_id}'s role"
        self.shell.post(ev.EngineFailed(ev.Failure(EngineLost.code, message)))

    def _write(self, effect: ev.WriteTransition) -> None:
        self._ledger.transition(effect.request_id, effect.state, effect.attempt, effect.step, **dict(effect.fields))

    def _lose(self, effect: ev.LoseEngine) -> None:
        if not self._stopping:
            log.error("engine lost", reason=effect.failure.message, story=[repr(e) for e in list(self.shell.story)[-50:]])
        self._lost.set_result(effect.failure)
