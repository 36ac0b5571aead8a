"""The agent's end of the worker's line: a Unix socket of mode 0600 that the worker connects to once. The protocol is
runtime.worker_line's; the end of the socket is the death of the worker.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from k3mesh.errors import ConfigError, EngineLost
from k3mesh.v1 import transfer_pb2
from services.contracts.placement import Placement
from services.runtime.wire import read_placement
from services.runtime.worker_line import ACCEPTED, LENGTH, MESSAGE_LIMIT, CudaArena, read_cuda_arenas, read_notice

ARENAS_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Export:
    """What a worker exports."""

    placement: Placement
    message: bytes  # LocalMessage, as it came
    descriptors: Sequence[int]  # of arenas in the host's memory; `close` them
    cuda: Sequence[CudaArena]  # arenas on a GPU

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class WorkerSocket:
    """`await meet()` the worker, `accept()` its export, then `read()` until it is gone."""

    def __init__(self, path: str):
        """Listen at `path`. ConfigError if that cannot be."""
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of an earlier life; there is one agent to a path
            self._listener.bind(path)
        except OSError as error:
            raise ConfigError(
                f"--agent-socket {path}: cannot be bound ({error.strerror or error}); give a short path that can be written",
                param="agent_socket",
            ) from error
        finally:
            os.umask(mask)
        self._listener.listen(1)
        self._inode = os.stat(path).st_ino
        self._worker: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def meet(self, timeout: float) -> Export:
        """The worker's record and where its arenas are. EngineLost if none comes within `timeout` seconds, ConfigError if the
        record cannot be."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                self._worker, _ = await loop.sock_accept(self._listener)
                self._listener.close()  # one worker, once
                self._worker.setblocking(False)
                head, fds = await _receive_fds(self._worker)
                self._reader, self._writer = await asyncio.open_unix_connection(sock=self._worker, limit=MESSAGE_LIMIT)
                data = await self._reader.readexactly(_length(head))
        except TimeoutError:
            raise EngineLost(f"no worker exported its pools at {self._path} within {timeout:g} s; see its log") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineLost(f"the worker at {self._path} went away during its export ({error!r}); see its log") from error
        message = transfer_pb2.LocalMessage.FromString(data)
        if message.WhichOneof("message") != "export":
            raise ConfigError("the worker's first message is not its export; run the same release in all processes")
        placement = read_placement(message.export)
        placement.check()
        return Export(placement, data, fds, read_cuda_arenas(message.export))

    def accept(self) -> None:
        """Tell the worker that its export stands."""
        assert self._writer is not None
        self._writer.write(ACCEPTED)

    async def read(self, deliver: Callable[[Any], None]) -> None:
        """Hand the worker's messages on; ends by EngineLost when the worker does."""
        assert self._reader is not None
        try:
            while True:
                length = _length(await self._reader.readexactly(LENGTH.size))
                deliver(read_notice(transfer_pb2.LocalMessage.FromString(await self._reader.readexactly(length))))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineLost("this rank's worker is gone; the engine must restart") from error

    def close(self) -> None:
        self._listener.close()
        if self._writer is not None:
            self._writer.close()
        elif self._worker is not None:
            self._worker.close()
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:  # and not of an agent that has taken our place
                os.unlink(self._path)


def _length(head: bytes) -> int:
    (length,) = LENGTH.unpack(head)
    if length > MESSAGE_LIMIT:
        raise ConfigError(f"the worker announces a message of {length} bytes; the limit is {MESSAGE_LIMIT}")
    return length


async def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The first four bytes and the descriptors that ride on them."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connection, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, ARENAS_LIMIT)
    if len(head) < LENGTH.size:
        raise ConnectionResetError("the socket ended within the first length")
    return head, fds
