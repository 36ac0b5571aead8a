"""A process that is stopped, and so keeps its sockets open, is noticed like one that died: it is killed, requests end, the
mesh heals."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.faults import TYPED, assert_heals, assert_survives
from tests.lib.load import Answer, assert_nothing_left, attempt, health, prompts, until_health
from tests.lib.mesh import Mesh, running_mesh

NOTICED_S = 10.0  # a stop is noticed within this
SOAK = [
    "prefill-0.worker-2", "prefill-0.agent-0", "decode-0.agent-1", "prefill-0.scheduler", "decode-0.scheduler",
]  # fmt: skip


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint, "--prefill=--chunked-prefill-size 128") as mesh:
        yield mesh


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["decode-0.worker-1", *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
async def test_a_stopped_process_is_killed_and_its_requests_end_with_typed_errors(mesh: Mesh, victim: str):
    ends = await assert_survives(mesh, [victim], signal.SIGSTOP, within=60)
    assert any(end in TYPED for end in ends if isinstance(end, int)), f"the stop came too late to prove anything: {ends}"


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_a_worker_that_stops_while_nothing_runs_makes_the_mesh_not_ready_within_ten_seconds(mesh: Mesh):
    await until_health(mesh)
    mesh.signal("prefill-0.worker-1", signal.SIGSTOP)
    await until_health(mesh, 503, within=NOTICED_S)
    await assert_heals(mesh)


@pytest.mark.timeout(120)
async def test_a_stopped_gateway_is_started_again_and_what_it_had_asked_for_is_freed(mesh: Mesh):
    assert await assert_survives(mesh, ["gateway"], signal.SIGSTOP, within=60) == [0] * 8


@pytest.mark.soak
@pytest.mark.timeout(120)
async def test_a_stopped_redis_is_started_again_and_running_requests_finish(mesh: Mesh):
    await until_health(mesh)
    running = [asyncio.ensure_future(attempt(mesh, prompt, max_tokens=200)) for prompt in prompts(4, [3, 300], 1024, 10)]
    async with asyncio.timeout(10):
        while (await mesh.inspect())["decode-0.scheduler"].counters["resident"] < 4:
            await asyncio.sleep(0.01)
    before = mesh.processes()["redis"]
    mesh.signal("redis", signal.SIGSTOP)
    assert all(isinstance(end, Answer) for end in await asyncio.gather(*running))
    async with asyncio.timeout(30):
        while mesh.processes().get("redis", before) == before:
            await asyncio.sleep(0.1)
    await assert_heals(mesh)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_short_stops_are_survived_by_everyone(mesh: Mesh):
    await until_health(mesh)
    before = mesh.processes()
    stop = asyncio.Event()

    async def ask(length: int) -> list[Answer | int]:
        ends: list[Answer | int] = []
        while not stop.is_set():
            ends.append(await attempt(mesh, [5 + length] * length, max_tokens=30))
        return ends

    asking = [asyncio.ensure_future(ask(length)) for length in (1, 100, 200)]
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2)
        os.kill(pid, signal.SIGCONT)
    stop.set()
    ends = [end for ends in await asyncio.gather(*asking) for end in ends]
    assert all(isinstance(end, Answer) for end in ends), ends
    assert mesh.processes() == before and await health(mesh) == 200
    await assert_nothing_left(mesh)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["prefill-0.worker-1", "decode-0.worker-3"])
async def test_a_stopped_tensor_parallel_peer_is_noticed_too(checkpoint: Path, victim: str):
    with running_mesh(checkpoint, "--topology", "laptop-tp2") as mesh:
        await assert_survives(mesh, [victim], signal.SIGSTOP, within=60)
