"""The ceiling that a transfer is measured against: raw UCXX between two processes, with the agents' settings, and nothing else.

UCXX's own interface in the mode that spec ucx recommends: a progress thread that sleeps, and Python futures. Two of these
processes, `--role send` and `--role receive`, each print their UCX address and read the other's. Then, for each line `N` on
their standard input, N bytes go from one to the other in messages of a piece's length, as many in flight as an agent has, each
lane with a buffer of its own, and each prints the seconds that it took. The end of standard input ends them.
"""

import asyncio
import os
import sys
import time
from typing import Any, Literal

import numpy as np
from pydantic import Field

from services.contracts.flags import FlagSet
from services.kvtransfer.carrier import LANES
from services.kvtransfer.transport import HOST
from services.runtime.process import Process, run

GO_TAG, FIRST_TAG = 1, 1 << 32


class CeilingArguments(FlagSet):
    """services.kvtransfer.ceiling."""

    role: Literal["send", "receive"] = Field(description="which end this is")


async def main(process: Process, arguments: CeilingArguments) -> None:
    os.environ.update(HOST.environment)
    import ucxx  # reads the environment when it is imported

    ucxx.init(progress_mode="thread", enable_python_future=True)
    _say(bytes(ucxx.get_worker_address()).hex())
    peer = ucxx.get_ucx_address_from_buffer(bytes.fromhex(await _hear()))
    endpoint: Any = await ucxx.create_endpoint_from_worker_address(peer)
    lanes = np.ones((LANES, HOST.piece_bytes), np.uint8)
    transfer = endpoint.recv if arguments.role == "receive" else endpoint.send

    async def run_lane(lane: int, messages: int) -> None:
        for number in range(lane, messages, LANES):
            await transfer(lanes[lane], tag=ucxx.types.Tag(FIRST_TAG + number), force_tag=True)

    go = np.zeros(1, np.uint8)
    while line := await _hear():
        running = [run_lane(lane, -(-int(line) // HOST.piece_bytes)) for lane in range(LANES)]
        began = time.perf_counter()
        if arguments.role == "receive":
            received = asyncio.gather(*running)
            await asyncio.sleep(0)  # every lane has posted its first receive
            await endpoint.send(go, tag=ucxx.types.Tag(GO_TAG), force_tag=True)
            await received
        else:
            await endpoint.recv(go, tag=ucxx.types.Tag(GO_TAG), force_tag=True)
            await asyncio.gather(*running)
        _say(str(time.perf_counter() - began))


def _say(line: str) -> None:
    print(line, flush=True)


async def _hear() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


if __name__ == "__main__":
    run("ceiling", main, CeilingArguments)
