"""The ceiling that a transfer is measured against: raw UCX between two processes, with the agents' settings, and nothing else.

Two of these processes, `--role send` and `--role receive`, each print their UCX address and read the other's. Then, for each
line `N` on their standard input, N bytes go from one buffer to the other in messages of a piece's length, as many in flight
as an agent has, and each prints the seconds that it took. The end of standard input ends them.
"""

import asyncio
import mmap
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from pydantic import Field

from services.contracts.flags import FlagSet
from services.kvtransfer.mover import LANES
from services.kvtransfer.transport import HOST, Transfer, Transport
from services.runtime.process import Process, run

GO_TAG, FIRST_TAG = 1, 1 << 32


class CeilingArguments(FlagSet):
    """services.kvtransfer.ceiling."""

    role: Literal["send", "receive"] = Field(description="which end this is")
    bytes: int = Field(ge=1, description="most that a line asks for")


async def main(process: Process, arguments: CeilingArguments) -> None:
    end = await asyncio.to_thread(End, arguments.bytes)
    _say(end.address.hex())
    await asyncio.to_thread(end.connect, bytes.fromhex(await _hear()))
    while line := await _hear():
        _say(str(await asyncio.to_thread(end.receive if arguments.role == "receive" else end.send, int(line))))


class End:
    """One of the two, with a buffer as long as all that goes."""

    def __init__(self, size: int):
        self._transport = Transport(HOST)
        self.address = self._transport.address
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = np.frombuffer(memory, np.uint8)
        self._buffer[:] = 1
        self._go = np.zeros(1, np.uint8)

    def connect(self, address: bytes) -> None:
        self._endpoint = self._transport.connect(address)

    def send(self, size: int) -> float:
        self._until(self._endpoint.receive(GO_TAG, self._go))
        return self._run(size, self._endpoint.send)

    def receive(self, size: int) -> float:
        return self._run(size, self._endpoint.receive, lambda: self._endpoint.send(GO_TAG, self._go))

    def _run(self, size: int, transfer: Callable[[int, Any], Transfer], ready: Callable[[], Transfer] | None = None) -> float:
        began = time.perf_counter()
        starts = deque(range(0, size, HOST.piece_bytes))
        running: deque[Transfer] = deque()
        while starts or running:
            while starts and len(running) < LANES:
                at = starts.popleft()
                running.append(transfer(FIRST_TAG + at, self._buffer[at : min(at + HOST.piece_bytes, size)]))
            if ready is not None:
                self._until(ready())
                ready = None
            self._until(running.popleft())
        return time.perf_counter() - began

    def _until(self, transfer: Transfer) -> None:
        while not transfer.completed:
            if not self._transport.progress() and not transfer.completed:
                self._transport.rest()
        self._transport.check(transfer)


def _say(line: str) -> None:
    print(line, flush=True)


async def _hear() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


if __name__ == "__main__":
    run("ceiling", main, CeilingArguments)
