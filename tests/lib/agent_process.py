"""`python -m tests.lib.agent_process JSON`: an agent with limits that a test can wait for, and a way that damages frames.

`damage` of the options is done to the third frame that prefill rank 0 sends. More can be asked for at run time: a word on
standard input is done to the next frame; `armed` and `done` answer on standard output.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from threading import Thread
from typing import Any

import numpy as np

from services.kvtransfer.agent import Agent, Place
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import Endpoint, Transport, TransportError
from services.runtime.process import run
from tests.lib.transfer import DEADLINE_S

options = json.loads(sys.argv[1])
frames = count()
random = Random(options["rank"])
asked: deque[str] = deque()


def say(word: str) -> None:
    print(word, flush=True)


def hear() -> None:
    for line in sys.stdin:
        asked.append(line.strip())
        say("armed")


class DamagedEndpoint(Endpoint):
    """Sends every frame as it is, but for what was asked for."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._over, self._next = asyncio.Event(), asyncio.Event()

    async def send(self, tag: int, buffer: Any) -> None:
        kind = asked.popleft() if asked else ""
        if next(frames) == 2 and options["damage"] and (options["role"], options["rank"]) == ("prefill", 0):
            kind = options["damage"]
        held, self._next = self._next, asyncio.Event()
        if not kind:
            await super().send(tag, buffer)
            held.set()
            return
        say("done")
        await getattr(self, kind)(lambda frame: Endpoint.send(self, tag, frame), buffer)

    async def abort(self) -> None:
        await super().abort()
        self._over.set()

    # ---- what can be done to a frame: `send` is the honest way, `frame` its bytes
    async def flip(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        wrong = frame.copy()
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        await send(wrong)

    async def truncate(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        await send(frame[: random.randrange(1, len(frame))].copy())

    async def extend(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        await send(np.concatenate([frame, frame[:64]]))

    async def drop(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        """It is gone, and the sender does not know."""

    async def hold(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        """Not before the end of the link."""
        await self._over.wait()
        await send(frame)

    async def delay(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        await asyncio.sleep(random.uniform(0.05, 0.3))
        await send(frame)

    async def reorder(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        """Behind the one that follows it, if one does."""
        try:
            async with asyncio.timeout(0.2):
                await self._next.wait()
        except TimeoutError:
            pass
        await send(frame)

    async def duplicate(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        again = asyncio.ensure_future(send(frame.copy()))  # nobody receives it: it ends with the link
        again.add_done_callback(lambda task: task.exception())
        await send(frame)

    async def late(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        """It is sent as it was, and once more when the room's memory may be another's."""
        await send(frame)
        again = asyncio.ensure_future(self._later(send, frame.copy()))
        again.add_done_callback(lambda task: task.exception())

    async def _later(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        await asyncio.sleep(0.5)
        await send(frame)

    async def reset(self, send: Callable[[Any], Awaitable[None]], frame: Any) -> None:
        raise TransportError("ConnectionReset: made by a test", peer_gone=True)


class DamagedTransport(Transport):
    async def connect(self, address: bytes) -> Endpoint:
        whole = await super().connect(address)
        return DamagedEndpoint(self, whole._endpoint)


class Arguments:
    @classmethod
    def parse(cls, argv: list[str]) -> list[str]:
        return argv


async def main(process: Any, _: Any) -> None:
    place = Place(
        *(options[key] for key in ("engine_id", "role", "rank", "listen", "agent_socket")), startup_timeout=DEADLINE_S
    )
    Thread(target=hear, daemon=True).start()
    await Agent(place, lambda _: Limits(**options["limits"]), DamagedTransport).run(process)


if __name__ == "__main__":
    run("agent", main, Arguments)
