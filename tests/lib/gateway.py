"""The real gateway on a free port of this event loop, before a scripted mesh."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from services.contracts.arguments import GatewayArguments
from services.gateway.main import main
from services.runtime.process import Process
from tests.lib.scripted_mesh import ScriptedMesh


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class GatewayProcess(Process):
    """The life of a service, with an event in place of the supervisor's socket."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = asyncio.Event()

    def ready(self) -> None:
        self.is_ready.set()


class RunningGateway:
    """Where it is and what stands behind it."""

    def __init__(self, port: int, mesh: ScriptedMesh, process: GatewayProcess):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.mesh = mesh
        self.process = process
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare TCP connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def running_gateway(
    model: Path, redis_url: str, mesh: ScriptedMesh | None = None, *, start_mesh: bool = True, **arguments: object
) -> AsyncIterator[RunningGateway]:
    """Started when the block begins, gone when it ends, its mesh too."""
    mesh = mesh or ScriptedMesh()
    address = f"127.0.0.1:{free_port()}"
    if start_mesh:
        await mesh.start(address)
    flags = {
        "model": model, "served-model-name": "tiny", "prefill-address": address, "port": free_port(), "redis-url": redis_url,
        "request-timeout": 30, "shutdown-timeout": 5,
    } | {name.replace("_", "-"): value for name, value in arguments.items()}  # fmt: skip
    parsed = GatewayArguments.parse([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    process = GatewayProcess()
    mesh.address = address
    async with asyncio.TaskGroup() as group:
        task = group.create_task(main(process, parsed))
        waiting = group.create_task(process.is_ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        running = RunningGateway(parsed.port, mesh, process)
        try:
            yield running
        finally:
            await running.http.aclose()
            process.stopping.set()
            await asyncio.wait({task})
            await mesh.stop()
