"""The prefill scheduler's process."""

from functools import partial

from k3mesh.v1 import request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.runtime import process
from services.runtime.ledger import Ledger
from services.runtime.rpc_server import RpcServer
from services.scheduler.life import live
from services.scheduler.prefill.fleet import Fleet
from services.scheduler.prefill.scheduler import PrefillScheduler
from services.scheduler.prefill.service import PrefillService

DRAIN_S = 25.0  # for those who are here when we are asked to end


async def main(life: process.Process, arguments: SchedulerArguments) -> None:
    """Serve until SIGTERM, then drain and return. EngineLost when a worker or an agent is lost, after everyone was told."""
    service = PrefillService(arguments)
    registration = (request_pb2_grpc.add_PrefillSchedulerServicer_to_server, service, "k3mesh.v1.PrefillScheduler")
    await live(life, arguments, service, registration, partial(_schedule, life, arguments, service), DRAIN_S)


async def _schedule(
    life: process.Process, arguments: SchedulerArguments, service: PrefillService, ledger: Ledger, server: RpcServer
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
