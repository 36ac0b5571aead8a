"""Any process may die at any time: every request ends with one typed error, and the mesh heals without a leak."""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.faults import TYPED, assert_heals, assert_survives
from tests.lib.load import Answer, assert_nothing_left, attempt, prompts, until_health
from tests.lib.mesh import Mesh, running_mesh

VICTIMS = [
    "prefill-0.worker-2", "decode-0.worker-1", "prefill-0.agent-0", "decode-0.agent-1", "prefill-0.scheduler",
    "decode-0.scheduler",
]  # fmt: skip


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint, "--prefill=--chunked-prefill-size 128") as mesh:
        yield mesh


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_killed_process_ends_its_requests_with_typed_errors_and_the_mesh_heals(mesh: Mesh, victim: str):
    ends = await assert_survives(mesh, [victim], signal.SIGKILL, within=30)
    assert any(end in TYPED for end in ends if isinstance(end, int)), f"the kill came too late to prove anything: {ends}"


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_processes_of_both_engines_and_the_gateway_may_die_at_once(mesh: Mesh):
    victims = ["decode-0.worker-0", "gateway", "prefill-0.worker-1"]
    assert 0 in await assert_survives(mesh, victims, signal.SIGKILL, within=30)


@pytest.mark.timeout(120)
async def test_redis_may_go_and_come_back_while_requests_run(mesh: Mesh):
    await until_health(mesh)
    running = [asyncio.ensure_future(attempt(mesh, prompt)) for prompt in prompts(4, [3, 300], 1024, 10)]
    async with asyncio.timeout(10):
        while (await mesh.inspect())["decode-0.scheduler"].counters["resident"] < 4:
            await asyncio.sleep(0.01)
    mesh.signal("redis", signal.SIGKILL)
    ends = await asyncio.gather(*running)
    assert all(isinstance(end, Answer) for end in ends), ends
    async with asyncio.timeout(20):
        while not isinstance(await attempt(mesh, [1, 2, 3]), Answer):
            await asyncio.sleep(0.1)
    await assert_nothing_left(mesh)


@pytest.mark.timeout(180)
async def test_a_stop_under_load_lets_requests_end_and_leaves_no_process(checkpoint: Path):
    with running_mesh(checkpoint) as mesh:  # which waits for the supervisor afterwards, and looks for processes
        running = [asyncio.ensure_future(attempt(mesh, prompt)) for prompt in prompts(8, [3, 300, 900], 1024, 9)]
        await asyncio.sleep(0.5)
        os.kill(supervisor_of(mesh), signal.SIGTERM)
        ends = await asyncio.gather(*running)
        assert all(isinstance(end, Answer) for end in ends), ends


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_killed_supervisor_takes_everything_along(checkpoint: Path):
    with running_mesh(checkpoint) as mesh:
        running = [asyncio.ensure_future(attempt(mesh, prompt)) for prompt in prompts(8, [3, 300, 900], 1024, 9)]
        await asyncio.sleep(0.5)
        descriptors = {name: os.pidfd_open(pid) for name, pid in mesh.processes().items()}
        os.kill(supervisor_of(mesh), signal.SIGKILL)
        alive = [name for name, descriptor in descriptors.items() if not select.select([descriptor], [], [], 20)[0]]
        for descriptor in descriptors.values():
            os.close(descriptor)
        assert not alive
        assert await asyncio.gather(*running) == [0] * len(running)
        mesh.state.clear_run()  # as the next `up` would


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_process_may_die_while_its_engine_starts_again(checkpoint: Path):
    with running_mesh(checkpoint) as mesh:
        for engine, second in (("prefill-0", "worker-3"), ("decode-0", "scheduler")):
            before = mesh.processes()[f"{engine}.{second}"]
            mesh.signal(f"{engine}.worker-1")
            async with asyncio.timeout(30):
                while mesh.processes().get(f"{engine}.{second}") in (None, before):
                    await asyncio.sleep(0.02)
            mesh.signal(f"{engine}.{second}")
            await assert_heals(mesh)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_an_engine_that_cannot_start_again_ends_the_mesh_with_its_cause(checkpoint: Path, tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    for file in checkpoint.iterdir():
        (model / file.name).symlink_to(file)
    with running_mesh(model) as mesh:
        supervisor = os.pidfd_open(supervisor_of(mesh))
        (model / "model.safetensors").unlink()
        mesh.signal("decode-0.worker-1")
        ended, _, _ = await asyncio.to_thread(select.select, [supervisor], [], [], 200)
        os.close(supervisor)
        assert ended and not mesh.processes()
        told = mesh.log("supervisor").splitlines()
        assert any("decode-0 was restarted 5 times" in line and "has no safetensors file" in line for line in told)


def supervisor_of(mesh: Mesh) -> int:
    pid = mesh.state.holder()
    assert pid is not None, "no supervisor"
    return pid
