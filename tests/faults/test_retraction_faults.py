"""What happens to requests that have made way: they may be cancelled, and a process may die while they are away."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3mesh.client import Client
from tests.lib.drafted import SMALL
from tests.lib.load import Answer, assert_nothing_left, attempt, prompts, until_health
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.oracle import Oracle
from tests.lib.predictable import predictable

MTP = "--speculative-algorithm MTP --speculative-num-draft-tokens 4"
FEW = "--num-blocks 12 --max-num-seqs 8 --low-latency-max-num-tokens-per-gpu 32 --no-speculative-adaptive"
ONE = "--data-parallel-size 1 --expert-parallel-size 1"
LONG = 1000  # one fits, two do not


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [word for word in SMALL if word != "--no-tokenizer"]
    return predictable(tmp_path_factory.mktemp("away"), *flags, share=0.005)[0]


@pytest.fixture(scope="module")
def mesh(target: Path) -> Iterator[Mesh]:
    """One replica with room for one long answer, which comes soon: the NextN layer is mostly right."""
    with running_mesh(target, f"--prefill=--pipeline-parallel-size 1 {MTP}", f"--decode={FEW} {ONE} {MTP}") as mesh:
        yield mesh


async def one_is_away(mesh: Mesh, seed: int) -> list[asyncio.Task[Answer | int]]:
    """Two requests, one of which has made way for the other."""
    running = [asyncio.ensure_future(attempt(mesh, prompt, LONG)) for prompt in prompts(2, [40, 100], 512, seed)]
    async with Client(mesh.prefill_address) as client, asyncio.timeout(60):
        while True:
            counters = (await client.inspect("decode-scheduler", mesh.decode_address)).counters
            assert not all(task.done() for task in running), "both ended, and nobody was away"
            if counters["retracted"] and counters["image_blocks_used"]:
                return running
            await asyncio.sleep(0.01)


@pytest.mark.timeout(120)
async def test_both_answers_have_the_tokens_that_the_model_gives(mesh: Mesh, target: Path):
    oracle = Oracle(target)
    for answer in await asyncio.gather(*await one_is_away(mesh, seed=3)):
        assert isinstance(answer, Answer) and len(answer.tokens) == LONG
        oracle.assert_greedy(answer.prompt, answer.tokens)
    await assert_nothing_left(mesh)


@pytest.mark.timeout(120)
async def test_a_request_that_is_cancelled_while_it_is_away_leaves_nothing(mesh: Mesh):
    running = await one_is_away(mesh, seed=1)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await assert_nothing_left(mesh)


@pytest.mark.timeout(120)
async def test_a_worker_that_dies_while_a_request_is_away_fails_both_and_the_mesh_heals(mesh: Mesh):
    running = await one_is_away(mesh, seed=2)
    mesh.signal("decode-0.worker-0", signal.SIGKILL)
    assert await asyncio.gather(*running) == [503, 503]
    await until_health(mesh)
    await assert_nothing_left(mesh)
    assert isinstance(await attempt(mesh, [5, 6, 7], 20), Answer)
