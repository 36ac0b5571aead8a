"""The decode scheduler's process."""

import asyncio

from k3mesh.v1 import request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.runtime import process
from services.runtime.ledger import Ledger
from services.runtime.rpc_server import RpcServer
from services.scheduler.decode.fleet import Fleet
from services.scheduler.decode.scheduler import DecodeScheduler
from services.scheduler.decode.service import DecodeService

DRAIN_S = 30.0  # for those who decode when we are asked to end
GRACE_S = 2.0  # for the last messages of open streams


async def main(life: process.Process, arguments: SchedulerArguments) -> None:
    """Serve until SIGTERM, then drain and return. EngineLost when a worker or an agent is lost, after everyone was told."""
    ledger = Ledger(arguments.redis_url, arguments.engine_id)
    await ledger.connect()
    service = DecodeService(arguments.engine_id)
    register = request_pb2_grpc.add_DecodeSchedulerServicer_to_server
    server = RpcServer(arguments.listen, [(register, service, "k3mesh.v1.DecodeScheduler")])
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
    life: process.Process, arguments: SchedulerArguments, ledger: Ledger, service: DecodeService, server: RpcServer
) -> None:
    """Come up with the engine's workers and agents, then schedule."""
    fleet = Fleet(arguments, await ledger.lease("ds"))
    try:
        await fleet.start()
        service.scheduler = DecodeScheduler(fleet, ledger, server.address)
        ledger.keep(service.scheduler.describe)
        await server.set_serving(True)
        life.ready()
        await service.scheduler.run()
    finally:
        await fleet.close()


if __name__ == "__main__":
    process.run("decode-scheduler", main, SchedulerArguments)
