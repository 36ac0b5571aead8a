"""Caches of nearly nothing: requests wait or are turned away, and all of them end."""

import asyncio
from pathlib import Path

import pytest

from tests.lib.load import Answer, assert_nothing_left, attempt, prompts
from tests.lib.mesh import running_mesh
from tests.lib.oracle import Oracle


@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_a_cache_of_one_request_serves_many_one_after_the_other(checkpoint: Path):
    one = "--num-blocks 3 --max-num-seqs 2"  # two blocks, as a prompt of 200 takes
    with running_mesh(checkpoint, f"--prefill={one}", f"--decode={one} --max-cudagraph-capture-size 1") as mesh:
        requests = prompts(12, [200, 3, 128, 256, 130], 1024, 21)
        ends = await asyncio.gather(*(attempt(mesh, prompt, max_tokens=20) for prompt in requests))
        for prompt, end in zip(requests, ends, strict=True):  # 256 and 20 new ones never fit
            assert end == 400 if len(prompt) == 256 else isinstance(end, Answer), (len(prompt), end)
        await assert_nothing_left(mesh)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_without_host_memory_answers_that_outgrow_the_cache_end_the_newest_and_no_other(checkpoint: Path):
    with running_mesh(checkpoint, "--decode=--num-blocks 12 --retraction-snapshot-ratio 0") as mesh:
        requests = [[5, 6, n] for n in range(4)]
        ends = await asyncio.gather(*(attempt(mesh, prompt, max_tokens=900) for prompt in requests))
        assert sorted(type(end) is int for end in ends) == [False, False, True, True], ends  # one on each replica
        assert {end for end in ends if isinstance(end, int)} == {524}
        oracle = Oracle(checkpoint)
        for end in ends:
            if isinstance(end, Answer):
                assert len(end.tokens) == 900
                oracle.assert_greedy(end.prompt, end.tokens)
        await assert_nothing_left(mesh)
