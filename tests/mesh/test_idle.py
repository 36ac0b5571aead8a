"""Idle costs (nearly) nothing."""

import asyncio

import psutil

from tests.lib.load import complete_all, prompts
from tests.lib.mesh import Mesh

SECONDS = 10.0


async def test_an_idle_mesh_uses_under_a_fifth_of_one_core(mesh: Mesh):
    await complete_all(mesh, prompts(4, [10, 200], 1024, 1), max_tokens=4, at_once=4)  # idle after work, not before it
    processes = {name: psutil.Process(pid) for name, pid in mesh.processes().items()}

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    before = used()
    await asyncio.sleep(SECONDS)
    shares = {name: (after - before[name]) / SECONDS for name, after in used().items()}
    assert sum(shares.values()) < 0.20, shares
