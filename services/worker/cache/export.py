"""The worker's line to its own transfer agent: first the arenas and where each field lies in them, then what happens to rooms.
The protocol is runtime.worker_line's.
"""

import asyncio
import socket

from k3mesh.errors import ConfigError, EngineLost
from services.contracts.barriers import Notice
from services.runtime import worker_line
from services.runtime.worker_line import ACCEPTED, LENGTH
from services.worker.cache.pools import Pools

RETRY_S = 0.05


class AgentLink:
    """An exported worker's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, path: str, pools: Pools, deadline: float) -> "AgentLink":
        """Connect and export within `deadline` seconds. ConfigError if no agent listens, EngineLost if it does not accept."""
        link = await _connect(path, deadline)
        message = worker_line.export(pools.placement, pools.cuda).SerializeToString()
        try:
            async with asyncio.timeout(deadline):
                socket.send_fds(link, [LENGTH.pack(len(message))], list(pools.fds))
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(link, message)
                answer = await loop.sock_recv(link, len(ACCEPTED))
        except (OSError, TimeoutError) as error:
            link.close()
            raise EngineLost(f"the transfer agent at {path} does not answer the export ({error!r}); see its log") from error
        if answer != ACCEPTED:
            link.close()
            raise EngineLost(f"the transfer agent at {path} refused the export; its log says why")
        return cls(*await asyncio.open_unix_connection(sock=link))

    def post(self, notice: Notice) -> None:
        """Tell the agent, in the order of calls. From any thread; never waits."""
        data = worker_line.notice(notice).SerializeToString()
        self._loop.call_soon_threadsafe(self._writer.write, LENGTH.pack(len(data)) + data)

    async def watch(self) -> None:
        """EngineLost as soon as the agent is gone; never returns otherwise."""
        try:
            await self._reader.read()
        except OSError:
            pass  # a reset is an end too
        raise EngineLost("this rank's transfer agent is gone; the engine must restart")

    def close(self) -> None:
        self._writer.close()


async def _connect(path: str, deadline: float) -> socket.socket:
    """Agent and worker start together, so the agent may not listen yet: at start, and only then, trying again is the way to
    learn when it does."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        async with asyncio.timeout(deadline):
            while True:
                try:
                    await asyncio.get_running_loop().sock_connect(link, path)
                    return link
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    await asyncio.sleep(RETRY_S)
    except (OSError, TimeoutError) as error:
        link.close()
        raise ConfigError(
            f"--agent-socket {path}: no transfer agent listens there within {deadline:g} s ({error!r}); "
            "start this rank's agent with the same path",
            param="agent_socket",
        ) from error
