"""The decode scheduler's process."""

from functools import partial

from k3mesh.v1 import request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.runtime import process
from services.runtime.ledger import Ledger
from services.runtime.rpc_server import RpcServer
from services.scheduler.decode.fleet import Fleet
from services.scheduler.decode.scheduler import DecodeScheduler
from services.scheduler.decode.service import DecodeService
from services.scheduler.life import live

DRAIN_S = 30.0  # for those who decode when we are asked to end


async def main(life: process.Process, arguments: SchedulerArguments) -> None:
    """Serve until SIGTERM, then drain and return. EngineLost when a worker or an agent is lost, after everyone was told."""
    service = DecodeService(arguments.engine_id)
    registration = (request_pb2_grpc.add_DecodeSchedulerServicer_to_server, service, "k3mesh.v1.DecodeScheduler")
    await live(life, arguments, service, registration, partial(_schedule, life, arguments, service), DRAIN_S)


async def _schedule(
    life: process.Process, arguments: SchedulerArguments, service: DecodeService, ledger: Ledger, server: RpcServer
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
