"""Whole handoffs between two agents whose pools are on GPUs, with frames so small that a request takes many. On one GPU where
there are not two: then the bytes travel within it, and all else is the same."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from k3mesh.errors import MeshError
from k3mesh.v1 import common_pb2, transfer_pb2_grpc
from services.launch.bench.transfer_pair import Pair
from services.launch.state import StateDir
from services.runtime.channels import open_channel

pytestmark = pytest.mark.gpu(1)
FRAME_BYTES, FRAMES = 2 << 20, 8
TOKENS, LONG = 1000, 32768


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    state = StateDir(str(tmp_path))
    state.create()
    devices = torch.device("cuda", 0), torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    async with Pair.run(state, LONG, FRAME_BYTES, FRAMES, devices=devices) as made:
        yield made


async def test_requests_one_by_one_and_at_once_are_byte_exact(pair: Pair):
    for _ in range(3):
        assert (await pair.transfer(TOKENS)).bytes == pair.decode.placement.expected_bytes(8)
    assert (await pair.transfer(LONG)).bytes == pair.decode.placement.expected_bytes(256)


async def test_a_decode_agent_killed_among_the_frames_fails_the_room_and_leaves_nothing_held(pair: Pair):
    async with open_channel(pair.prefill.address) as channel:
        stub = transfer_pb2_grpc.TransferControlStub(channel)

        async def counters() -> Any:
            return await stub.Inspect(common_pb2.InspectRequest(), timeout=10)

        moving = asyncio.ensure_future(pair.transfer(LONG))
        async with asyncio.timeout(30):
            while (await counters()).totals["frames"] < 3:
                pass
        assert pair.decode.agent.pid is not None
        os.kill(pair.decode.agent.pid, signal.SIGKILL)
        with pytest.raises(MeshError, match=r"decode-agent|prefill-0 rank 0"):
            await moving
        async with asyncio.timeout(30):
            while any(value for name, value in (await counters()).counters.items()):
                await asyncio.sleep(0.1)
