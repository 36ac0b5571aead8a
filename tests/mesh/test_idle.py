"""Idle costs (nearly) nothing."""

import asyncio

from services.launch.bench.samples import cpu_seconds
from tests.lib.load import complete_all, prompts
from tests.lib.mesh import Mesh

SECONDS = 10.0


def used_seconds(mesh: Mesh) -> dict[str, float]:
    """Processor time of each process since its start."""
    return {name: cpu_seconds(pid) for name, pid in mesh.processes().items()}


async def test_an_idle_mesh_uses_under_a_fifth_of_one_core(mesh: Mesh):
    await complete_all(mesh, prompts(4, [10, 200], 1024, 1), max_tokens=4, at_once=4)  # idle after work, not before it
    before = used_seconds(mesh)
    await asyncio.sleep(SECONDS)
    shares = {name: (after - before[name]) / SECONDS for name, after in used_seconds(mesh).items()}
    assert len(shares) == 16 and sum(shares.values()) < 0.20, shares
