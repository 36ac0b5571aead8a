"""UCX as the mover's thread sees it: what a transfer is when its endpoint or its peer goes. In processes of their own: what UCX
leaves behind at their end is not the tests'."""

import asyncio
import os
import sys
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from tests.lib.transfer import ROOT


def carries_a_message() -> None:
    from services.kvtransfer.transport import Transport

    transport = Transport()
    endpoint = transport.connect(transport.address)
    sent, received = np.arange(256, dtype=np.uint8).repeat(8192), np.zeros(1 << 21, np.uint8)
    transfers = [endpoint.receive(7, received), endpoint.send(7, sent)]
    while not all(it.completed for it in transfers):
        if not transport.progress() and not all(it.completed for it in transfers):
            transport.rest()
    for it in transfers:
        transport.check(it)
    assert np.array_equal(sent, received)


def ends_receives_by_an_abort() -> None:
    from services.kvtransfer.transport import Transport, TransportError

    transport = Transport()
    endpoint = transport.connect(transport.address)
    waiting = endpoint.receive(1, np.zeros(1 << 20, np.uint8))
    endpoint.abort()
    while not waiting.completed:
        transport.progress()
    for attempt in (lambda: transport.check(waiting), lambda: endpoint.send(1, np.zeros(8, np.uint8))):
        with pytest.raises(TransportError) as error:
            attempt()
        assert error.value.peer_gone


def rests_until_what_it_watches_can_be_read() -> None:
    from threading import Timer

    from services.kvtransfer.transport import Transport

    transport, bell = Transport(), os.eventfd(1)
    transport.watch(bell)
    transport.rest()  # it could be read before
    os.eventfd_read(bell)
    while transport.progress():
        pass
    Timer(0.1, os.eventfd_write, (bell, 1)).start()
    cpu = time_of_thread()
    transport.rest()
    assert os.eventfd_read(bell) == 1
    assert time_of_thread() - cpu < 0.05, "it spins"


def time_of_thread() -> float:
    import time

    return time.thread_time()


@pytest.mark.parametrize("promise", [carries_a_message, ends_receives_by_an_abort, rests_until_what_it_watches_can_be_read])
async def test_a_transport(promise: Callable[[], None]):
    script = f"from tests.contract import test_transport as it; it.alone(it.{promise.__name__})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


def alone(promise: Callable[[], None]) -> None:
    try:
        promise()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
