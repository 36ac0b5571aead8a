"""Leader to tensor-parallel peers on one node: the leader hands on each command's bytes as they are, in order.

A Unix stream socket in the run directory carries [u32 length, little-endian][bytes]. A peer speaks once, to say that it is
ready (a WorkerHello); the leader sends WorkerCommands. Peers only execute: what they compute is what the leader computes.
The end of a socket is the end of the epoch, on both sides.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from google.protobuf.message import DecodeError

from k3mesh.errors import ConfigError, EngineLost
from k3mesh.v1 import worker_pb2
from services.runtime.telemetry import log

SEND_DEADLINE_S = 60.0  # a peer's loop that does not read for so long hangs
HELLO_DEADLINE_S, HELLO_LIMIT = 10.0, 64 << 10  # from the connection on; bytes
LENGTH = struct.Struct("<I")


def socket_path(run_dir: str, leader: int) -> Path:
    """Where the leader with this global rank listens."""
    return Path(run_dir) / f"leader-{leader}.sock"


class Leader:
    """The leader's end: a connection to each of `peers`, by global rank. With none it opens no socket and everything is
    immediate."""

    def __init__(self, path: Path, peers: Collection[int]):
        self._path, self._missing = path, set(peers)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._hellos: list[worker_pb2.WorkerHello] = []
        self._complete = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Before any peer may connect; peers connect once the rank group has met."""
        if not self._missing:
            self._complete.set()
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        except OSError as error:
            raise ConfigError(
                f"--run-dir {self._path.parent}: cannot listen on {self._path.name} there ({error}); "
                "choose a directory that can be written, with a short path",
                param="run_dir",
            ) from error

    async def hellos(self, deadline: float) -> list[worker_pb2.WorkerHello]:
        """What the peers said when they became ready. EngineLost if one is not within `deadline` seconds."""
        try:
            async with asyncio.timeout(deadline):
                await self._complete.wait()
        except TimeoutError as error:
            raise EngineLost(
                f"tensor-parallel peers {sorted(self._missing)} are not ready after {deadline:g} s; their logs say why"
            ) from error
        return self._hellos

    async def send(self, data: bytes) -> None:
        """Hand one command to every peer, in the order of calls. EngineLost if a peer does not read."""
        frame = LENGTH.pack(len(data)) + data
        try:
            async with asyncio.timeout(SEND_DEADLINE_S):
                for writer in self._writers:
                    writer.write(frame)
                for writer in self._writers:
                    await writer.drain()
        except (OSError, TimeoutError) as error:
            raise EngineLost(f"a tensor-parallel peer does not take commands ({error!r})") from error

    async def watch(self) -> None:
        """EngineLost as soon as a peer that was ready is gone; never returns otherwise."""
        await self._lost

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in self._writers:
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _hello(reader)
        if hello is None or hello.rank not in self._missing:
            log.warning("turned away: no peer of this group, or one that is here already", rank=hello and hello.rank)
            writer.close()
            return
        self._missing.remove(hello.rank)
        self._hellos.append(hello)
        self._writers.append(writer)
        if not self._missing:
            assert self._server is not None
            self._server.close()  # nobody else has business here
            self._complete.set()
        await reader.read()  # a peer says no more: this ends when it does
        if not self._lost.done():
            self._lost.set_exception(EngineLost(f"rank {hello.rank}, a tensor-parallel peer, is gone; the engine must restart"))


class Peer:
    """A peer's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, path: Path, hello: worker_pb2.WorkerHello) -> "Peer":
        """Tell the leader that this rank is ready. The leader listens by then; EngineLost if it does not."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise EngineLost(f"the leader of this tensor-parallel group does not listen on {path} ({error})") from error
        data = hello.SerializeToString()
        writer.write(LENGTH.pack(len(data)) + data)
        return cls(reader, writer)

    async def commands(self) -> AsyncIterator[worker_pb2.WorkerCommand]:
        """The leader's commands in order. EngineLost when the leader is gone."""
        while (data := await _receive(self._reader)) is not None:
            yield worker_pb2.WorkerCommand.FromString(data)
        raise EngineLost("the leader of this tensor-parallel group is gone; the engine must restart")

    def close(self) -> None:
        self._writer.close()


async def _hello(reader: asyncio.StreamReader) -> worker_pb2.WorkerHello | None:
    """What a new connection says first; None if that is no hello, or does not come in time."""
    try:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            data = await _receive(reader, HELLO_LIMIT)
        return None if data is None else worker_pb2.WorkerHello.FromString(data)
    except (TimeoutError, DecodeError):
        return None


async def _receive(reader: asyncio.StreamReader, limit: int = 1 << 32) -> bytes | None:
    """The next frame; None at the end of the stream, also inside a frame, and for one longer than `limit`."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length) if length <= limit else None
    except (asyncio.IncompleteReadError, OSError):
        return None
