"""A prefill engine that is up: the planner in its shell, and who carries its effects."""

import asyncio
from collections.abc import Awaitable, Callable
from random import SystemRandom
from typing import Any

import services.scheduler.prefill.events as ev
from k3mesh.errors import EngineLost
from services.contracts.ids import RequestId
from services.runtime.ledger import Ledger, Value
from services.runtime.shell import Shell
from services.runtime.telemetry import log
from services.scheduler.block_keys import BLOCK_BYTES
from services.scheduler.prefill.clients import Clients
from services.scheduler.prefill.fleet import Fleet
from services.scheduler.prefill.pairing import DecodeLink
from services.scheduler.prefill.planner import PrefillPlanner


class PrefillScheduler:
    """Wires the parts together. `run` until the engine is lost, `drain` before an orderly end."""

    def __init__(self, fleet: Fleet, ledger: Ledger, decode_address: str, changed: Callable[[], Awaitable[None]]):
        """`changed` is awaited when `not_ready_reason` may have changed."""
        self.planner = PrefillPlanner(fleet.limits(), SystemRandom())
        self.shell = Shell(self.planner)
        self.clients = Clients(self.shell.post)
        self.link = DecodeLink(decode_address, fleet.introduction(), self.shell.post)
        self.keys = fleet.block_keys()
        self.fleet, self._ledger, self._changed = fleet, ledger, changed
        self.draining = False
        self._emptied = asyncio.Event()
        self._stopping = False
        self._lost: asyncio.Future[ev.Failure] = asyncio.get_running_loop().create_future()
        self.shell.launch = self._launch
        carriers: dict[type, Callable[[Any], Any]] = {
            ev.Reserve: self._reserve,
            ev.CancelOnDecode: self.link.cancel_room,
            ev.DropDecode: self.link.drop,
            ev.CancelOnAgents: fleet.cancel,
            ev.ForgetRooms: fleet.forget,
            ev.PublishQueued: self.clients.publish,
            ev.PublishAttached: self.clients.publish,
            ev.PublishTokens: self.clients.publish,
            ev.PublishFinished: self.clients.publish,
            ev.PublishFailure: self.clients.publish,
            ev.PublishHandedOver: self.clients.publish,
            ev.WriteTransition: self._write,
            ev.RequestGone: self.clients.forget,
            ev.Emptied: lambda _: self._emptied.set(),
            ev.HealthChanged: self._health_changed,
            ev.LoseEngine: self._lose,
        }
        for effect, carrier in carriers.items():
            self.shell.on(effect, carrier)

    @property
    def not_ready_reason(self) -> str:
        """Empty when a request would be taken."""
        if self.draining:
            return "draining"
        if not self._ledger.available:
            return "Redis is away"
        return self.link.reason or self.planner.alarm.reason(self.shell.clock.now())

    async def run(self) -> None:
        """Until stop(). EngineLost when the engine is lost, once everyone who waits was told."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.shell.run()),
                group.create_task(self._drive_fleet()),
                group.create_task(self.link.run(self._changed)),
                group.create_task(self._hear_cancels()),
                group.create_task(self._keep_lease()),
            ]
            failure = await self._lost
            for task in tasks:
                task.cancel()
        await self.link.close()
        if not self._stopping:
            raise EngineLost(failure.message, detail=failure.detail or failure.code)

    def stop(self) -> None:
        """End now; whoever is still here is told so."""
        self._stopping = True
        self.shell.post(ev.EngineFailed(ev.Failure(EngineLost.code, "it was shut down")))

    async def drain(self, timeout: float) -> int:
        """Admit nobody any more and wait for those who are here -> how many are left when the time is up."""
        self.draining = True
        self._emptied.clear()
        self.shell.post(ev.DrainAsked())
        try:
            async with asyncio.timeout(timeout):
                await self._changed()
                await self._emptied.wait()
        except TimeoutError:
            log.warning("drained in part", **self.planner.counters())
        return len(self.planner.roster.requests)

    async def cancel(self, request_id: RequestId, reason: str) -> bool:
        """End a request wherever it is -> whether it was known."""
        if not self.clients.is_open(request_id):
            return await self.link.cancel(request_id, reason)
        self.shell.post(ev.CancelRequested(request_id, reason))
        return True

    def check_open(self) -> None:
        """EngineLost when new requests cannot be taken: at the very end, and while nobody could tell what became of them."""
        if self._lost.done():
            raise EngineLost(self._lost.result().message)
        if not self._ledger.available:
            raise EngineLost("Redis is away, so no new requests are taken; try again in a few seconds", retry_after=2)

    def describe(self) -> dict[str, Value]:
        """The engine's entry in the ledger."""
        limits = self.planner.limits
        return {
            "role": "prefill",
            "epoch": self.fleet.hello.engine_epoch,
            "health": self.not_ready_reason or "ready",
            "stages": limits.stages,
            "tp_size": limits.tp_size,
            "blocks": limits.num_blocks - 1,
            "slots": limits.num_slots - 1,
            **self.planner.counters(),
            **self.planner.cache(),
        }

    async def _drive_fleet(self) -> None:
        try:
            await self.fleet.run(self.shell.post)
        except EngineLost as error:
            self.shell.post(ev.EngineFailed(ev.Failure.of(error)))

    async def _hear_cancels(self) -> None:
        """The decode scheduler reads the same stream for what it has installed."""
        async for request_id in self._ledger.cancels():
            self.shell.post(ev.CancelRequested(RequestId(request_id), "asked for in the ledger"))

    async def _keep_lease(self) -> None:
        await self._ledger.lease_lost.wait()
        self.shell.post(ev.EngineFailed(ev.Failure(EngineLost.code, "another scheduler took its lease")))

    async def _health_changed(self, effect: ev.HealthChanged) -> None:
        log.error("unhealthy", reason=effect.reason) if effect.reason else log.info("healthy again")
        await self._changed()

    def _reserve(self, effect: ev.Reserve) -> None:
        prompt, prompt_hash = self.clients.prompt(effect.request_id), self.clients.prompt_hash(effect.request_id)
        tail = prompt[len(effect.keys) * BLOCK_BYTES :] if self.keys else b""
        self.link.reserve(effect, prompt_hash, tail)

    def _launch(self, step: ev.PrefillStep) -> None:
        for transition in step.transitions:
            self._write(transition)
        self.fleet.launch(step, self.clients.prompt)

    def _write(self, effect: ev.WriteTransition) -> None:
        self._ledger.transition(effect.request_id, effect.state, effect.attempt, effect.step, effect.owner, **effect.fields)

    def _lose(self, effect: ev.LoseEngine) -> None:
        if not self._stopping:
            log.error("engine lost", reason=effect.failure.message, story=[repr(e) for e in list(self.shell.story)[-50:]])
        if not self._lost.done():
            self._lost.set_result(effect.failure)
