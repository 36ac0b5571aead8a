"""`python -m tests.lib.mover_process DESCRIPTOR JSON`: a mover that damages frames. Its standard input and output
are its agent's.

`damage` of the options is done to the third piece that prefill rank 0 sends. More can be asked for at run time: a word on
standard input is done to the next piece; `armed` and `done` answer on standard output.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from random import Random
from threading import Thread, Timer
from typing import Any

import numpy as np

from services.kvtransfer.mover_main import run
from services.kvtransfer.transport import Endpoint, Profile, Transfer, Transport, TransportError

options = json.loads(sys.argv[2])
pieces = count()
random = Random(options["rank"])
asked: deque[str] = deque()


def say(word: str) -> None:
    print(word, flush=True)


def hear() -> None:
    for line in sys.stdin:
        asked.append(line.strip())
        say("armed")


class Done:
    """A send that never was, and that the sender takes for done."""

    completed = True

    def check_error(self) -> None: ...


class Later:
    """A send that begins when it may. The transport's thread asks."""

    def __init__(self, may: Callable[[], bool], begin: Callable[[], Transfer]):
        self._may, self._begin = may, begin
        self._transfer: Transfer | None = None
        self._error: TransportError | None = None

    @property
    def completed(self) -> bool:
        if self._transfer is None and self._error is None and self._may():
            try:
                self._transfer = self._begin()
            except TransportError as error:
                self._error = error
        return self._error is not None or (self._transfer is not None and self._transfer.completed)

    def check_error(self) -> None:
        if self._error is not None:
            raise self._error
        assert self._transfer is not None
        self._transfer.check_error()


class DamagedEndpoint(Endpoint):
    """Sends every piece as it is, but for what was asked for."""

    def __init__(self, transport: "DamagedTransport", endpoint: Any):
        super().__init__(transport, endpoint)
        self._clock = transport
        self._kept: list[Any] = []  # what UCX may still read
        self._over = False
        self._sent = 0

    def send(self, tag: int, buffer: Any) -> Transfer:
        kind = asked.popleft() if asked else ""
        if next(pieces) == 2 and options["damage"] and (options["role"], options["rank"]) == ("prefill", 0):
            kind = options["damage"]
        self._sent += 1
        if not kind:
            return super().send(tag, buffer)
        say("done")
        return getattr(self, kind)(lambda piece: Endpoint.send(self, tag, piece), buffer)

    def abort(self) -> None:
        super().abort()
        self._over = True

    # ---- what can be done to a piece: `send` is the honest way, `piece` its bytes
    def flip(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        wrong = piece.copy()
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        return send(self._keep(wrong))

    def truncate(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        return send(self._keep(piece[: random.randrange(1, len(piece))].copy()))

    def extend(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        return send(self._keep(np.concatenate([piece, piece[:64]])))

    def drop(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        """It is gone, and the sender does not know."""
        return Done()

    def hold(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        """Not before the end of the link."""
        return Later(lambda: self._over, lambda: send(piece))

    def delay(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        return Later(self._clock.passes(random.uniform(0.05, 0.3)), lambda: send(piece))

    def reorder(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        """Behind the one that follows it, if one does."""
        number, passed = self._sent, self._clock.passes(0.2)
        return Later(lambda: self._sent > number or passed(), lambda: send(piece))

    def duplicate(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        self._kept.append(send(self._keep(piece.copy())))  # one of them nobody receives: it ends with the link
        return send(piece)

    def late(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        """It is sent as it was, and once more when the room's memory may be another's."""
        again = self._keep(piece.copy())
        self._clock.later.append(Later(self._clock.passes(0.5), lambda: send(again)))
        return send(piece)

    def reset(self, send: Callable[[Any], Transfer], piece: Any) -> Transfer:
        raise TransportError("ConnectionReset: made by a test", peer_gone=True)

    def _keep(self, piece: Any) -> Any:
        self._kept.append(piece)
        return piece


class DamagedTransport(Transport):
    def __init__(self, profile: Profile):
        super().__init__(profile)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.watch(self._bell)
        self.later: list[Later] = []  # sends that nobody waits for

    def connect(self, address: bytes) -> Endpoint:
        whole = super().connect(address)
        return DamagedEndpoint(self, whole._endpoint)

    def progress(self) -> bool:
        self.later = [it for it in self.later if not it.completed]
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return super().progress()

    def passes(self, seconds: float) -> Callable[[], bool]:
        """Whether so much time has gone by, to be asked then: the thread is woken."""
        due = time.monotonic() + seconds
        timer = Timer(seconds + 0.001, os.eventfd_write, (self._bell, 1))  # not before it is due
        timer.daemon = True
        timer.start()
        return lambda: time.monotonic() >= due


if __name__ == "__main__":
    Thread(target=hear, daemon=True).start()
    run(DamagedTransport)
