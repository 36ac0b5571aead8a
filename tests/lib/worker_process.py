"""Worker processes of one engine, driven by a test: their scheduler's streams and their agents' sockets end here."""

import asyncio
import mmap
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from k3mesh.v1 import transfer_pb2, worker_pb2, worker_pb2_grpc
from services.runtime.channels import open_channel
from tests.lib.golden import GOLDEN, TINY
from tests.lib.ranks import free_address

DEADLINE_S = 90.0
LENGTH = struct.Struct("<I")


class AgentEnd:
    """A transfer agent's end of its worker's socket: the record, the arenas, and what the worker tells."""

    def __init__(self, path: Path):
        self.path = path
        self.placement = transfer_pb2.Placement()
        self.arenas: list[mmap.mmap] = []
        self.messages: list[transfer_pb2.LocalMessage] = []
        self.exported = asyncio.Event()
        self._grown = asyncio.Condition()
        self._link: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen()

    async def serve(self) -> None:
        """Accept one worker's export and read until it ends."""
        loop = asyncio.get_running_loop()
        self._link, _ = await loop.sock_accept(self._listener)
        self._link.setblocking(False)
        readable = asyncio.Event()
        loop.add_reader(self._link, readable.set)
        await readable.wait()
        loop.remove_reader(self._link)
        head, fds, _, _ = socket.recv_fds(self._link, LENGTH.size, 8)
        self.placement = transfer_pb2.LocalMessage.FromString(await self._read(LENGTH.unpack(head)[0])).export
        assert len(fds) == len(self.placement.arenas)
        for fd in fds:
            self.arenas.append(mmap.mmap(fd, 0))
            os.close(fd)
        await loop.sock_sendall(self._link, b"\x01")
        self.exported.set()
        while head := await self._read(LENGTH.size):
            message = transfer_pb2.LocalMessage.FromString(await self._read(LENGTH.unpack(head)[0]))
            async with self._grown:
                self.messages.append(message)
                self._grown.notify_all()

    async def until(self, kind: str, count: int = 1) -> list[transfer_pb2.LocalMessage]:
        """All messages so far, once there are `count` of a kind."""
        async with asyncio.timeout(DEADLINE_S), self._grown:
            await self._grown.wait_for(lambda: sum(m.WhichOneof("message") == kind for m in self.messages) >= count)
        return self.messages

    def unit(self, field: transfer_pb2.Field, unit: int) -> memoryview:
        start = field.offset + unit * field.unit_stride
        return memoryview(self.arenas[field.arena_id])[start : start + field.payload]

    def close(self) -> None:
        self._listener.close()
        if self._link is not None:
            self._link.close()

    def hang_up(self) -> None:
        """What the worker sees when its agent dies."""
        assert self._link is not None
        self._link.shutdown(socket.SHUT_RDWR)

    async def _read(self, size: int) -> bytes:
        """Exactly `size` bytes, or none at the end."""
        assert self._link is not None
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._link, size - len(data))
            if not part:
                return b""
            data += part
        return data


class Drive:
    """A scheduler's stream to one leader."""

    def __init__(self, address: str, fence: int = 1):
        self.channel = open_channel(address)
        self._stream = worker_pb2_grpc.WorkerControlStub(self.channel).Drive(wait_for_ready=True)
        self._fence = fence

    async def introduce(self) -> worker_pb2.WorkerHello:
        await self.send(introduce=worker_pb2.Introduce(scheduler="test"))
        return (await self.report()).hello

    async def send(self, fence: int | None = None, **command: object) -> None:
        await self._stream.write(worker_pb2.WorkerCommand(fence=self._fence if fence is None else fence, **command))

    async def report(self) -> worker_pb2.WorkerReport:
        async with asyncio.timeout(DEADLINE_S):
            report = await self._stream.read()
        assert isinstance(report, worker_pb2.WorkerReport), "the stream has ended"
        return report

    async def end(self) -> None:
        """Say that nothing follows."""
        await self._stream.done_writing()

    async def finished(self) -> grpc.StatusCode:
        async with asyncio.timeout(DEADLINE_S):
            return await self._stream.code()

    async def details(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            return await self._stream.details()

    async def close(self) -> None:
        self._stream.cancel()
        await self.channel.close()


class Workers:
    """All worker processes of an engine with these flags, each with an agent's end."""

    def __init__(self, folder: Path, flags: Sequence[str], world: int, tp: int, agents: bool = True):
        self.folder, self.world, self.tp = folder, world, tp
        self.addresses = [free_address() for _ in range(world)]
        self.processes: list[asyncio.subprocess.Process] = []
        self.agents = [AgentEnd(folder / f"agent-{rank}.sock") for rank in range(world)] if agents else []
        self.drives: list[Drive] = []
        self._common = ["--model", str(GOLDEN / TINY), "--dtype", "float32", "--world-size", str(world)]
        self._common += ["--attn-tp-size", str(tp), "--dist-init-addr", free_address(), "--run-dir", str(folder)]
        self._flags = flags  # these win

    async def start(self) -> None:
        for rank in range(self.world):
            own = ["--rank", str(rank), "--listen", self.addresses[rank]]
            own += ["--agent-socket", str(self.folder / f"agent-{rank}.sock")]
            with (self.folder / f"worker-{rank}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "services.worker.main", *self._common, *own, *self._flags,
                    stdout=log, stderr=log, env={**os.environ, "K3MESH_PARENT": str(os.getpid())},
                )  # fmt: skip
            self.processes.append(process)

    async def drive(self) -> list[worker_pb2.WorkerHello]:
        """Open a stream to every leader."""
        self.drives = [Drive(address) for address in self.addresses[:: self.tp]]
        return [await drive.introduce() for drive in self.drives]

    async def send(self, **command: object) -> list[worker_pb2.WorkerReport]:
        """One command to all leaders, one report from each."""
        for drive in self.drives:
            await drive.send(**command)
        return [await drive.report() for drive in self.drives]

    async def exit_code(self, rank: int) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.processes[rank].wait()

    def log(self, rank: int) -> str:
        return (self.folder / f"worker-{rank}.log").read_text()


@asynccontextmanager
async def workers(folder: Path, *flags: str, world: int = 1, tp: int = 1, agents: bool = True) -> AsyncIterator[Workers]:
    """Started processes, which do not outlive the block."""
    engine = Workers(folder, flags, world, tp, agents)
    await engine.start()
    serving = [asyncio.ensure_future(agent.serve()) for agent in engine.agents]
    try:
        yield engine
    except BaseException:
        for rank in range(world):
            print(f"--- worker {rank}\n{engine.log(rank)}")
        raise
    finally:
        for drive in engine.drives:
            await drive.close()
        for process in engine.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for agent in engine.agents:
            agent.close()
