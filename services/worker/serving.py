"""One rank's process once its rank is built: led by its scheduler, or by the leader of its tensor-parallel group.

Whatever ends one of its lines (scheduler, peers, agent, device) ends the epoch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from k3mesh.errors import MeshError
from k3mesh.v1 import worker_pb2_grpc
from services.contracts.arguments import WorkerArguments
from services.runtime.process import Process
from services.runtime.rpc_server import RpcServer
from services.runtime.telemetry import log
from services.worker import wire
from services.worker.control import Control
from services.worker.engine import Engine, Runner, epoch_over
from services.worker.fanout import Leader, Peer, socket_path

GRACE_S = 2.0  # for what is queued, and for the last report to leave


@dataclass(frozen=True)
class Rank:
    """What a process serves. `watch` ends, by a MeshError, when something beside the device is lost; `memory_peak` tells the
    bytes that the rank has had at most."""

    hello: wire.WorkerHello
    runner: Runner
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    memory_peak: Callable[[], int] | None = None


Build = Callable[[Engine, AsyncExitStack], Awaitable[Rank]]


async def serve(process: Process, arguments: WorkerArguments, group: Sequence[int], build: Build) -> None:
    """Serve until told to stop. `group`: the global ranks of this one's tensor-parallel group, the leader first. EngineLost
    when the epoch is over."""
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(_serve(process, arguments, group, build))
        await process.stopping.wait()
        serving.cancel()


async def _serve(process: Process, a: WorkerArguments, group: Sequence[int], build: Build) -> NoReturn:
    path = socket_path(a.run_dir, group[0])
    async with AsyncExitStack() as stack:
        leader = None
        if a.rank == group[0]:
            leader = Leader(path, group[1:])
            stack.push_async_callback(leader.close)
            await leader.listen()  # before the groups meet, after which peers connect
        engine = Engine(a.cpu_threads)
        stack.push_async_callback(engine.close, GRACE_S)
        rank = await build(engine, stack)
        control = Control(engine, leader, rank.hello, a.startup_timeout, rank.memory_peak)
        # A peer computes what its leader reports.
        engine.start(rank.runner, control.deliver if leader is not None else None)
        server = RpcServer(
            a.listen, [(worker_pb2_grpc.add_WorkerControlServicer_to_server, control, "k3mesh.v1.WorkerControl")]
        )
        await server.start()
        stack.push_async_callback(server.stop, GRACE_S)
        try:
            async with asyncio.TaskGroup() as lines:
                if rank.watch is not None:
                    lines.create_task(rank.watch())
                lines.create_task(engine.watch())
                if leader is not None:
                    lines.create_task(leader.watch())
                    lines.create_task(control.watch())
                else:
                    lines.create_task(_follow(path, engine, rank.hello))
                control.set_ready()
                await server.set_serving(True)
                process.ready()
        except* MeshError as errors:
            error = epoch_over(_first(errors))
            log.error("the epoch ends", error=error.message)
            control.end(error)
            raise error from None
        raise AssertionError("lines end by an error only")


async def _follow(path: Path, engine: Engine, hello: wire.WorkerHello) -> None:
    """A peer's life: say that it is ready, then do what its leader hands on."""
    peer = await Peer.connect(path, wire.hello(hello))
    try:
        async for message in peer.commands():
            engine.submit(wire.command(message))
    finally:
        peer.close()


def _first(group: BaseExceptionGroup[MeshError]) -> MeshError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MeshError)
    return error
