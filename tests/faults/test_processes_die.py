"""Any process may die at any time: every request ends with one typed error, and the mesh heals without a leak."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.lib.load import Answer, assert_nothing_left, complete, prompts
from tests.lib.mesh import Mesh, running_mesh

VICTIMS = [
    "prefill-0.worker-2", "decode-0.worker-1", "prefill-0.agent-0", "decode-0.agent-1", "prefill-0.scheduler",
    "decode-0.scheduler",
]  # fmt: skip
STATUSES = {502, 503, 504, 429}


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint, "--prefill=--chunked-prefill-size 128") as mesh:
        yield mesh


async def healthy(mesh: Mesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=5) as client, asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def run(mesh: Mesh, prompt: list[int]) -> Answer | int:
    """The answer, or the status of the error: a well-formed one in any case."""
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        response = await client.post("/v1/completions", json=body)
    if response.status_code == 200:
        choice = response.json()["choices"][0]
        return Answer(prompt, choice["token_ids"], choice["finish_reason"])
    error = response.json()["error"]
    assert error["message"] and error["type"] and error["code"], error
    return response.status_code


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_killed_process_ends_its_requests_with_typed_errors_and_the_mesh_heals(mesh: Mesh, victim: str):
    await healthy(mesh)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        truth = (await complete(client, [500, 600, 700], max_tokens=8, ignore_eos=True)).tokens
    running = [asyncio.ensure_future(run(mesh, prompt)) for prompt in prompts(8, [3, 300, 900], 1024, 9)]
    await asyncio.sleep(0.5)
    mesh.signal(victim, signal.SIGKILL)
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*running)
    assert all(isinstance(end, Answer) or end in STATUSES for end in ends), ends
    assert any(not isinstance(end, Answer) for end in ends), "the kill came too late to prove anything"
    await healthy(mesh)
    await assert_nothing_left(mesh)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        assert (await complete(client, [500, 600, 700], max_tokens=8, ignore_eos=True)).tokens == truth


@pytest.mark.timeout(120)
async def test_redis_may_go_and_come_back_while_requests_run(mesh: Mesh):
    await healthy(mesh)
    running = [asyncio.ensure_future(run(mesh, prompt)) for prompt in prompts(4, [3, 300], 1024, 10)]
    async with asyncio.timeout(10):
        while (await mesh.inspect())["decode-0.scheduler"].counters["resident"] < 4:
            await asyncio.sleep(0.01)
    mesh.signal("redis", signal.SIGKILL)
    ends = await asyncio.gather(*running)
    assert all(isinstance(end, Answer) for end in ends), ends
    async with asyncio.timeout(20):
        while not isinstance(await run(mesh, [1, 2, 3]), Answer):
            await asyncio.sleep(0.1)
    await assert_nothing_left(mesh)
