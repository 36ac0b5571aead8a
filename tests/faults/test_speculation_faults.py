"""Requests that end, and processes that die, while windows are drafted and verified: no window, draft row, place, slot, block,
pin or frame is left behind, and tokens afterwards are those of before.

A request's draft rows lie in its blocks. The drafters here are slow, so that most of a last stage's step is theirs: DSpark's is
many layers deep, NextN's takes many steps.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from safetensors.torch import load_file, save_file

from k3mesh.client import Client, SamplingParams, Stream, Tokens
from k3mesh.errors import Cancelled, DeadlineExceeded
from tests.lib.drafted import SMALL
from tests.lib.faults import TYPED, assert_heals
from tests.lib.load import Answer, assert_nothing_left, attempt, complete_all, prompts, until_health
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.predictable import predictable

VOCAB = 512
DEPTH = 48  # of the DSpark drafter; the target's last stage has one layer
WIDTHS = {"DSPARK": 8, "MTP": 16}
LAST, BEFORE = "prefill-0.worker-3", "prefill-0.worker-2"
ENDS = ["leaves", "is cancelled by hand", "is out of time"]


@pytest.fixture(scope="module", params=["DSPARK", pytest.param("MTP", marks=pytest.mark.soak)])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = [word for word in SMALL if word != "--no-tokenizer"]
    target, drafter = predictable(tmp_path_factory.mktemp("faults"), *flags, share=0.02)
    words = f"--speculative-algorithm {request.param} --speculative-num-draft-tokens {WIDTHS[request.param]}"
    if request.param == "DSPARK":
        deepen(drafter)
        words += f" --speculative-draft-model-path {drafter}"
    prefill, decode = "--chunked-prefill-size 128 --num-blocks 33", "--max-num-seqs 8 --num-blocks 33"
    with running_mesh(target, f"--prefill={prefill} {words}", f"--decode={decode} {words} --no-speculative-adaptive") as mesh:
        yield mesh


def deepen(drafter: Path) -> None:
    """DEPTH layers, copies of the first."""
    config = json.loads((drafter / "config.json").read_text())
    weights = load_file(drafter / "model.safetensors")
    first = {name.removeprefix("layers.0."): weights[name] for name in list(weights) if name.startswith("layers.0.")}
    for layer in range(config["num_hidden_layers"], DEPTH):
        weights |= {f"layers.{layer}.{name}": tensor.clone() for name, tensor in first.items()}
    save_file(weights, drafter / "model.safetensors", {"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(config | {"num_hidden_layers": DEPTH}))


async def until_drafting(mesh: Mesh, client: Client, seconds: float = 20) -> None:
    """The last stage has begun a step that the stage before it has done with. Its target layer takes a small part of it."""

    async def worker(name: str) -> Any:
        return await client.inspect("worker", mesh.addresses["prefill-0"]["workers"][int(name[-1])])

    async with asyncio.timeout(seconds):
        while True:
            before, last = await asyncio.gather(worker(BEFORE), worker(LAST))
            if last.counters["pending_steps"] and before.totals["steps"] > last.totals["steps"]:
                return


async def until_rounds(mesh: Mesh, count: int) -> None:
    """So many rounds more are done."""

    async def rounds() -> int:
        return (await mesh.inspect())["decode-0.scheduler"].totals["rounds"]

    before = await rounds()
    async with asyncio.timeout(30):
        while await rounds() < before + count:
            await asyncio.sleep(0.01)


async def end(mesh: Mesh, stream: Stream, how: str) -> None:
    if how == "leaves":
        await stream.cancel()
    elif how == "is cancelled by hand":
        async with redis.asyncio.from_url(mesh.redis_url) as journal:
            await journal.xadd("k3:cancel", {"request_id": stream.request_id})


async def tokens_of(stream: Stream) -> list[int]:
    return [token async for event in stream if isinstance(event, Tokens) for token in event.tokens]


async def truth(mesh: Mesh) -> list[list[int]]:
    """What the mesh answers when nothing disturbs it."""
    answers = await complete_all(mesh, prompts(3, [7, 128, 200], VOCAB, 4), max_tokens=12, at_once=3, ignore_eos=True)
    return [answer.tokens for answer in answers]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ENDS)
async def test_a_request_that_ends_while_prefill_drafts_leaves_nothing(mesh: Mesh, how: str):
    await until_health(mesh)
    before = await truth(mesh)
    async with Client(mesh.prefill_address) as client:
        loop = asyncio.get_running_loop()
        took = 0.0  # seconds from the submission until the drafter was at work
        seen = 0
        for prompt in prompts(12, [100, 128, 1], VOCAB, 6):
            timeout = took if seen and how == "is out of time" else None
            started = loop.time()
            stream = await client.submit(prompt, SamplingParams(max_tokens=600, ignore_eos=True), timeout=timeout)
            ended = asyncio.ensure_future(tokens_of(stream))
            if timeout is None:
                try:
                    await until_drafting(mesh, client, seconds=4)
                except TimeoutError:  # it was over before it was seen
                    await stream.cancel()
                else:
                    seen += 1
                    took = loop.time() - started
                    await end(mesh, stream, how if how != "is out of time" else "leaves")
            else:
                seen += 1
            with pytest.raises((Cancelled, DeadlineExceeded)):
                await ended
            await assert_nothing_left(mesh)  # so that the next one's steps are the only ones
            if seen == 4:
                break
        assert seen == 4, "the drafter was not seen at work"
    assert await truth(mesh) == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ENDS)
async def test_a_request_that_ends_during_speculating_rounds_leaves_nothing_and_disturbs_nobody(mesh: Mesh, how: str):
    await until_health(mesh)
    before = await truth(mesh)
    async with Client(mesh.prefill_address) as client:
        for _ in range(2):
            timeout = 1.5 if how == "is out of time" else None
            sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
            streams = [await client.submit(prompt, sampling, timeout=timeout) for prompt in prompts(3, [130, 1, 64], VOCAB, 7)]
            ended = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
            staying = asyncio.ensure_future(truth(mesh))
            await until_rounds(mesh, 4)
            for stream in streams:
                await end(mesh, stream, how)
            ends = await asyncio.gather(*ended, return_exceptions=True)
            assert all(isinstance(it, Cancelled | DeadlineExceeded) for it in ends), ends
            assert await staying == before
    await assert_nothing_left(mesh)
    assert await truth(mesh) == before


def victims(*always: str, soak: tuple[str, ...]) -> list[Any]:
    return [*always, *(pytest.param(name, marks=pytest.mark.soak) for name in soak)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", victims(LAST, soak=("prefill-0.agent-3", "prefill-0.scheduler", "decode-0.agent-0")))
async def test_a_process_that_dies_while_prefill_drafts_leaves_nothing(mesh: Mesh, victim: str):
    await assert_survives(mesh, victim, drafting=True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "victim", victims("decode-0.worker-1", soak=("decode-0.worker-0", "decode-0.agent-1", "decode-0.scheduler", "gateway"))
)
async def test_a_process_that_dies_during_speculating_rounds_leaves_nothing(mesh: Mesh, victim: str):
    await assert_survives(mesh, victim, drafting=False)


async def assert_survives(mesh: Mesh, victim: str, drafting: bool) -> None:
    """Kill it at that moment: requests end by a typed error or whole, the mesh heals and answers as before."""
    await until_health(mesh)
    before = await truth(mesh)
    running = [asyncio.ensure_future(attempt(mesh, prompt, max_tokens=900)) for prompt in prompts(6, [3, 100, 128], VOCAB, 9)]
    if drafting:
        async with Client(mesh.prefill_address) as client:
            await until_drafting(mesh, client)
    else:
        await until_rounds(mesh, 8)
    mesh.signal(victim, signal.SIGKILL)
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*running)
    assert all(isinstance(end, Answer) or end in TYPED | {0} for end in ends), ends
    assert any(not isinstance(end, Answer) for end in ends), f"the kill came too late to prove anything: {ends}"
    await assert_heals(mesh)
    assert await truth(mesh) == before
