"""Greedy tokens through HTTP are those of an independent full recompute, whatever the mesh's shape."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.load import assert_nothing_left, complete_all, prompts
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.oracle import Oracle

# 1 to 300 tokens: single rows, block edges (127, 128, 129, 256, 257) and several chunks of 128.
LENGTHS = [1, 2, 7, 33, 64, 127, 128, 129, 200, 255, 256, 257, 300]
# Few places and blocks, so that 24 requests reuse every one of them.
SMALL = ("--prefill=--chunked-prefill-size 128 --max-num-seqs 8 --num-blocks 33", "--decode=--max-num-seqs 8 --num-blocks 25")


@pytest.fixture(scope="module", params=["laptop", "laptop-tp2"])
def shaped_mesh(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint, "--topology", request.param, *SMALL) as mesh:
        yield mesh


@pytest.mark.timeout(240)
async def test_greedy_tokens_equal_an_independent_full_recompute(shaped_mesh: Mesh, checkpoint: Path):
    requests = prompts(24, LENGTHS, vocab=1024, seed=5)
    answers = await complete_all(shaped_mesh, requests, max_tokens=12, at_once=8, ignore_eos=True)
    oracle = Oracle(checkpoint)
    for answer in answers:
        assert len(answer.tokens) == 12 and answer.finish_reason == "length"
        oracle.assert_greedy(answer.prompt, answer.tokens, tie=0.0)
    assert len({tuple(answer.tokens) for answer in answers}) > 20, "the model says the same to everyone: a weak test"
    await assert_nothing_left(shaped_mesh)


async def test_answers_grow_across_block_edges(shaped_mesh: Mesh, checkpoint: Path):
    requests = prompts(2, [120, 250], vocab=1024, seed=6)
    answers = await complete_all(shaped_mesh, requests, max_tokens=30, at_once=2, ignore_eos=True)
    oracle = Oracle(checkpoint)
    for answer in answers:
        oracle.assert_greedy(answer.prompt, answer.tokens, tie=0.0)
    await assert_nothing_left(shaped_mesh)


async def test_a_seed_gives_the_same_sampled_tokens_alone_and_in_company(shaped_mesh: Mesh):
    request = prompts(1, [40], vocab=1024, seed=7)
    how = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 11, "ignore_eos": True}
    alone = (await complete_all(shaped_mesh, request, max_tokens=10, at_once=1, **how))[0]
    company = await complete_all(shaped_mesh, request * 4 + prompts(4, LENGTHS, 1024, 8), max_tokens=10, at_once=8, **how)
    assert [answer.tokens for answer in company[:4]] == [alone.tokens] * 4
    other = (await complete_all(shaped_mesh, request, max_tokens=10, at_once=1, **{**how, "seed": 12}))[0]
    assert other.tokens != alone.tokens
    await assert_nothing_left(shaped_mesh)
