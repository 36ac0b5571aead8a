"""The two processes of services.kvtransfer.ceiling, raw UCXX with the agents' settings, and what they measure."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from k3mesh.errors import MeshError
from services.launch.bench.samples import Sample, cpu_seconds
from services.launch.child import ROOT

DEADLINE_S = 120.0


class Ceiling:
    """A sender and a receiver. `transfer` moves bytes from one to the other."""

    def __init__(self, sender: asyncio.subprocess.Process, receiver: asyncio.subprocess.Process):
        self._both = (receiver, sender)

    @classmethod
    @asynccontextmanager
    async def run(cls) -> AsyncIterator["Ceiling"]:
        async with AsyncExitStack() as stack:
            sender, receiver = both = [await stack.enter_async_context(_process(role)) for role in ("send", "receive")]
            addresses = [await _hear(process) for process in both]
            for process, peer in zip(both, reversed(addresses), strict=True):
                _say(process, peer)
            yield cls(sender, receiver)

    async def transfer(self, size: int, times: int = 1) -> Sample:
        """`times` times `size` bytes, one after the other."""
        cpu, seconds = self._cpu_seconds(), 0.0
        for _ in range(times):
            for process in self._both:
                _say(process, str(size))
            receiver, _ = [float(await _hear(process)) for process in self._both]
            seconds += receiver
        return Sample(seconds, size * times, self._cpu_seconds() - cpu)

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self._both)


@asynccontextmanager
async def _process(role: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kvtransfer.ceiling", "--role", role,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "K3MESH_PARENT": str(os.getpid())},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _say(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def _hear(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise MeshError(f"raw UCXX, which the ceiling is measured with, did not answer within {DEADLINE_S:g} s") from None
    if not line:
        raise MeshError("raw UCXX, which the ceiling is measured with, ended; the lines above say why")
    return line.decode().strip()
