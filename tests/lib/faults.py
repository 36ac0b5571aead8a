"""What must hold when a running mesh is hurt."""

import asyncio
import os
import select
from collections.abc import Sequence
from itertools import count

from k3mesh.errors import MeshError
from tests.lib.load import Answer, assert_nothing_left, attempt, prompts, until_health
from tests.lib.mesh import Mesh

TYPED = {502, 503, 504, 429}
SEEDS = count(9)  # new prompts each time: known ones would be over too soon


async def assert_survives(mesh: Mesh, victims: Sequence[str], number: int, within: float) -> list[Answer | int]:
    """Send a signal to processes while eight requests are on their way -> how these ended: all by an answer or a typed error,
    within `within` seconds. Afterwards the victims are gone, the mesh heals, nothing is left, and it answers as before."""
    await until_health(mesh)
    truth = await attempt(mesh, [500, 600, 700], max_tokens=8)
    running = [asyncio.ensure_future(attempt(mesh, prompt)) for prompt in prompts(8, [3, 300, 900], 1024, next(SEEDS))]
    await asyncio.sleep(0.5)
    gone = [os.pidfd_open(mesh.processes()[victim]) for victim in victims]
    for victim in victims:
        mesh.signal(victim, number)
    async with asyncio.timeout(within):
        ends = await asyncio.gather(*running)
    assert all(isinstance(end, Answer) or end in TYPED | {0} for end in ends), ends
    for victim, descriptor in zip(victims, gone, strict=True):
        ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], 20)
        os.close(descriptor)
        assert ended, f"{victim} is still there"
    await assert_heals(mesh)
    assert await attempt(mesh, [500, 600, 700], max_tokens=8) == truth
    return ends


async def assert_heals(mesh: Mesh) -> None:
    """The mesh becomes ready again and holds nothing of what was; no process of an earlier life is left."""
    async with asyncio.timeout(60):
        while True:
            await until_health(mesh)
            try:
                await mesh.inspect()
                break
            except MeshError:  # its health has not noticed yet
                await asyncio.sleep(0.1)
    await assert_nothing_left(mesh)
    assert not mesh.strays(), "processes that nobody knows"
