"""Idle costs (nearly) nothing."""

import asyncio
import os
from pathlib import Path

from tests.lib.load import complete_all, prompts
from tests.lib.mesh import Mesh

SECONDS = 10.0


def used_seconds(mesh: Mesh) -> dict[str, float]:
    """Processor time of each process since its start (proc(5): utime and stime of /proc/PID/stat)."""

    def of(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    return {name: of(pid) for name, pid in mesh.processes().items()}


async def test_an_idle_mesh_uses_under_a_fifth_of_one_core(mesh: Mesh):
    await complete_all(mesh, prompts(4, [10, 200], 1024, 1), max_tokens=4, at_once=4)  # idle after work, not before it
    before = used_seconds(mesh)
    await asyncio.sleep(SECONDS)
    shares = {name: (after - before[name]) / SECONDS for name, after in used_seconds(mesh).items()}
    assert len(shares) == 16 and sum(shares.values()) < 0.20, shares
