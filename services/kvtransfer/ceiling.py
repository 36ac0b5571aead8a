"""The ceiling that a transfer is measured against: raw UCXX between two processes, with the agents' settings, and nothing else.

`python -m services.kvtransfer.ceiling send|receive FRAME_BYTES WINDOW`. Each prints its UCX address and reads its peer's; then,
for each line `N` on their standard input, N frames go from one to the other, WINDOW of them in flight, each lane with a
buffer of its own, and each prints the seconds that it took.
"""

import asyncio
import sys
import time
from typing import Any

import numpy as np
import uvloop

from services.kvtransfer.transport import start_ucx

GO_TAG, FIRST_TAG = 1, 1 << 32


async def main(role: str, frame_bytes: int, window: int) -> None:
    ucxx = start_ucx()
    _say(bytes(ucxx.get_worker_address()).hex())
    peer = ucxx.get_ucx_address_from_buffer(bytes.fromhex(await _hear()))
    endpoint: Any = await ucxx.create_endpoint_from_worker_address(peer)
    transfer = endpoint.recv if role == "receive" else endpoint.send
    lanes = np.ones((window, frame_bytes), np.uint8)

    async def run(lane: int, frames: int) -> None:
        for number in range(lane, frames, window):
            await transfer(lanes[lane], tag=ucxx.types.Tag(FIRST_TAG + number), force_tag=True)

    go = np.zeros(1, np.uint8)
    while line := await _hear():
        began = time.perf_counter()
        if role == "receive":
            posted = [asyncio.ensure_future(run(lane, int(line))) for lane in range(window)]
            await asyncio.sleep(0)  # into their first receives
            began = time.perf_counter()
            await endpoint.send(go, tag=ucxx.types.Tag(GO_TAG), force_tag=True)
            await asyncio.gather(*posted)
        else:
            await endpoint.recv(go, tag=ucxx.types.Tag(GO_TAG), force_tag=True)
            await asyncio.gather(*(run(lane, int(line)) for lane in range(window)))
        _say(str(time.perf_counter() - began))


def _say(line: str) -> None:
    print(line, flush=True)


async def _hear() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
