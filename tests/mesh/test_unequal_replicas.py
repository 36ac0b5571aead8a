"""Full replicas beside idle ones: rounds go on in lockstep, and nobody's tokens depend on who else is there."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from k3mesh.client import Client, SamplingParams, Tokens
from k3mesh.errors import Cancelled
from tests.lib.load import assert_nothing_left, prompts
from tests.lib.mesh import Mesh, running_mesh

PLACES, LONG, ALONE = 32, 120, 24
ROOM = "--max-num-seqs 64 --num-blocks 97"


@pytest.fixture(scope="module")
def wide_mesh(checkpoint: Path) -> Iterator[Mesh]:
    """Two decode replicas of 32 places each."""
    decode = f"--decode={ROOM} --max-cudagraph-capture-size 32"
    with running_mesh(checkpoint, "--topology", "laptop", f"--prefill={ROOM}", decode) as mesh:
        yield mesh


async def answer(client: Client, prompt: list[int], max_tokens: int, request_id: str) -> list[int]:
    """All tokens, or those until it was cancelled."""
    stream = await client.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id=request_id)
    tokens: list[int] = []
    with contextlib.suppress(Cancelled):
        async for event in stream:
            tokens += event.tokens if isinstance(event, Tokens) else ()
    return tokens


async def until_live(mesh: Mesh, wanted: list[int]) -> None:
    """Until the replicas' workers have so many places taken."""
    async with asyncio.timeout(60), Client(mesh.prefill_address) as client:
        workers = mesh.addresses["decode-0"]["workers"]
        while [(await client.inspect("worker", worker)).counters["places"] for worker in workers] != wanted:
            await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
async def test_a_full_replica_beside_one_that_empties_gives_everybody_the_tokens_that_it_gets_alone(wide_mesh: Mesh):
    requests = prompts(8, [1, 7, 33, 100], 1024, 21)
    journal = redis.Redis.from_url(wide_mesh.redis_url, decode_responses=True)
    async with Client(wide_mesh.prefill_address) as client:
        alone = [await answer(client, prompt, ALONE, f"alone-{n}") for n, prompt in enumerate(requests)]
        names = [f"one-of-{n}" for n in range(2 * PLACES)]
        tasks = [asyncio.ensure_future(answer(client, requests[n % 8], LONG, name)) for n, name in enumerate(names)]
        await until_live(wide_mesh, [PLACES, PLACES])
        leaving = {name for name in names if journal.hget(f"k3:req:{name}", "replica") == "1"}
        assert len(leaving) == PLACES
        await asyncio.gather(*(client.cancel(name) for name in leaving))
        await until_live(wide_mesh, [PLACES, 0])
        assert await answer(client, requests[3], ALONE, "late") == alone[3], "alone on its replica, beside a full one"
        answers = await asyncio.gather(*tasks)
    for n, (name, tokens) in enumerate(zip(names, answers, strict=True)):
        assert tokens[:ALONE] == alone[n % 8][: len(tokens)]
        assert name in leaving or len(tokens) == LONG
    stayed = [n for n, name in enumerate(names) if name not in leaving]
    for n in stayed:
        assert answers[n] == answers[next(other for other in stayed if other % 8 == n % 8)]
    assert len({tuple(tokens) for tokens in alone}) > 4, "the model says the same to everyone: a weak test"
    await assert_nothing_left(wide_mesh)
