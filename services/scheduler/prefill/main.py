"""The prefill scheduler's process."""

import asyncio

from k3mesh.v1 import request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.runtime import process
from services.runtime.ledger import Ledger
from services.runtime.rpc_server import RpcServer
from services.scheduler.prefill.fleet import Fleet
from services.scheduler.prefill.scheduler import PrefillScheduler
from services.scheduler.prefill.service import PrefillService

DRAIN_S = 25.0  # for those who are here when we are asked to end
GRACE_S = 2.0  # for the last messages of open streams


async def main(life: process.Process, arguments: SchedulerArguments) -> None:
    """Serve until SIGTERM, then drain and return. EngineLost when a worker or an agent is lost, after everyone was told."""
    ledger = Ledger(arguments.redis_url, arguments.engine_id)
    await ledger.connect()
    service = PrefillService(arguments)
    register = request_pb2_grpc.add_PrefillSchedulerServicer_to_server
    server = RpcServer(arguments.listen, [(register, service, "k3mesh.v1.PrefillScheduler")])
    try:
        await server.start()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(_serve(life, arguments, ledger, service, server))
            await life.stopping.wait()
            await server.set_serving(False)
            if service.scheduler is None:
                serving.cancel()
            else:
                await service.scheduler.drain(DRAIN_S)
                service.scheduler.stop()
    finally:
        await server.stop(GRACE_S)
        await ledger.close()


async def _serve(
    life: process.Process, arguments: SchedulerArguments, ledger: Ledger, service: PrefillService, server: RpcServer
) -> None:
    """Come up with the engine's workers and agents, then schedule. Serving once a decode engine is paired."""
    assert arguments.decode_address is not None
    fleet = Fleet(arguments, await ledger.lease("ps"))
    try:
        await fleet.start()

        async def changed() -> None:
            await server.set_serving(not scheduler.not_ready_reason)

        scheduler = service.scheduler = PrefillScheduler(fleet, ledger, arguments.decode_address, changed)
        ledger.keep(scheduler.describe)
        life.ready()
        await scheduler.run()
    finally:
        await fleet.close()


if __name__ == "__main__":
    process.run("prefill-scheduler", main, SchedulerArguments)
