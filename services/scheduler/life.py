"""The life of a scheduler's process, the same for both: ledger and server up, the engine beside them, drain, down."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from services.contracts.arguments import SchedulerArguments
from services.runtime.ledger import Ledger
from services.runtime.process import Process
from services.runtime.rpc_server import Registration, RpcServer

GRACE_S = 2.0  # for the last messages of open streams


class Scheduler(Protocol):
    async def drain(self, timeout: float) -> int: ...

    def stop(self) -> None: ...


class Service(Protocol):
    @property
    def scheduler(self) -> Scheduler | None:
        """There once the engine is up."""
        ...


async def live(
    life: Process,
    arguments: SchedulerArguments,
    service: Service,
    registration: Registration,
    schedule: Callable[[Ledger, RpcServer], Coroutine[Any, Any, None]],
    drain_s: float,
) -> None:
    """Serve until SIGTERM, then drain and return. `schedule` comes up with the engine, sets the service's scheduler and runs
    it; its EngineLost, when a worker or an agent is lost, comes after everyone was told."""
    ledger = Ledger(arguments.redis_url, arguments.engine_id)
    await ledger.connect()
    server = RpcServer(arguments.listen, [registration])
    try:
        await server.start()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(schedule(ledger, server))
            await life.stopping.wait()
            await server.set_serving(False)
            if service.scheduler is None:
                serving.cancel()
            else:
                await service.scheduler.drain(drain_s)
                service.scheduler.stop()
    finally:
        await server.stop(GRACE_S)
        await ledger.close()
