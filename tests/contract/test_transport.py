"""UCXX's behaviour that the transport relies on or makes up for. In a process of its own: UCX has one context in each."""

import asyncio
import os
import sys
import traceback
from collections.abc import Coroutine
from typing import Any

import numpy as np

from tests.lib.transfer import ROOT


async def test_a_transfer_that_begins_while_its_endpoint_is_aborted_ends_as_a_peer_that_is_gone():
    script = "from tests.contract import test_transport as it; it.alone(it.begin_in_an_abort())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


def alone(test: Coroutine[Any, Any, None]) -> None:
    """Run it, and end without UCXX's threads, which do not end by themselves."""
    try:
        asyncio.run(test)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


async def begin_in_an_abort() -> None:
    from services.kvtransfer.transport import Transport, TransportError

    transport = Transport()
    endpoint = await transport.connect(transport.address)
    outcomes: list[object] = []
    for transfer in (endpoint.receive, endpoint.send):
        begun = asyncio.ensure_future(transfer(1, np.zeros(1 << 20, np.uint8)))
        await asyncio.sleep(0)  # it has seen a live endpoint, UCXX has not been called yet
        endpoint._aborted = True
        endpoint._endpoint.abort()
        outcomes += await asyncio.gather(begun, return_exceptions=True)
        endpoint = await transport.connect(transport.address)
    assert all(isinstance(it, TransportError) and it.peer_gone for it in outcomes), outcomes
    assert transport.tasks == 0
