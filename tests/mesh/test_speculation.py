"""Through the whole mesh, a drafter changes how fast tokens come and none of them: DSpark and NextN over 1, 2 and 4 stages."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.worker.speculative.sampling import Sampling, sample
from tests.lib.drafted import SMALL
from tests.lib.load import assert_nothing_left, complete_all, prompts
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.oracle import Oracle
from tests.lib.predictable import predictable

VOCAB = 512
# Chunk boundaries inside and at the ends of prompts, block edges, single rows.
LENGTHS = [1, 2, 7, 33, 64, 127, 128, 129, 200, 255, 256, 257, 300]
PREFILL = "--chunked-prefill-size 128 --max-num-seqs 8 --num-blocks 33"
DECODE = "--max-num-seqs 8 --num-blocks 33 --low-latency-max-num-tokens-per-gpu 32"
SHAPES = {
    "one stage": ("laptop", "--pipeline-parallel-size 1"),
    "two stages": ("laptop-tp2", ""),
    "four stages": ("laptop", ""),
}
WIDTHS = {"DSPARK": 8, "MTP": 4}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with its NextN layer, and a DSpark drafter; both drafters are right about half of the time."""
    flags = [word for word in SMALL if word != "--no-tokenizer"]
    return predictable(tmp_path_factory.mktemp("speculation"), *flags, share=0.02)


@dataclass(frozen=True)
class Speculating:
    mesh: Mesh
    width: int

    async def totals(self) -> dict[str, int]:
        return (await self.mesh.inspect())["decode-0.scheduler"].totals


def combinations() -> list[Any]:
    """Each algorithm on one shape in every run; the others in `make soak`."""
    always = {("DSPARK", "two stages"), ("MTP", "four stages")}
    every = [(algorithm, shape) for shape in SHAPES for algorithm in WIDTHS]
    return [pytest.param(it, id=", ".join(it), marks=() if it in always else pytest.mark.soak) for it in every]


@pytest.fixture(scope="module", params=combinations())
def speculating(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Speculating]:
    (algorithm, shape), (target, drafter) = request.param, checkpoints
    topology, stages = SHAPES[shape]
    flags = f"--speculative-algorithm {algorithm} --speculative-num-draft-tokens {WIDTHS[algorithm]}"
    if algorithm == "DSPARK":
        flags += f" --speculative-draft-model-path {drafter}"
    engines = (f"--prefill={PREFILL} {stages} {flags}", f"--decode={DECODE} {flags} --no-speculative-adaptive")
    with running_mesh(target, "--topology", topology, *engines) as mesh:
        yield Speculating(mesh, WIDTHS[algorithm])


@pytest.fixture(scope="module")
def oracle(checkpoints: tuple[Path, Path]) -> Oracle:
    return Oracle(checkpoints[0])


@pytest.mark.timeout(240)
async def test_greedy_tokens_equal_a_full_recompute_of_the_target(
    speculating: Speculating, oracle: Oracle, record_property: Callable[[str, object], None]
):
    before = await speculating.totals()
    answers = await complete_all(speculating.mesh, prompts(52, LENGTHS, VOCAB, 5), max_tokens=16, at_once=8, ignore_eos=True)
    for answer in answers:
        assert len(answer.tokens) == 16
        oracle.assert_greedy(answer.prompt, answer.tokens)
    totals = {key: value - before[key] for key, value in (await speculating.totals()).items()}
    record_property("totals", totals)
    assert totals["tokens_accepted"] > 0.3 * totals["windows"], "hardly a proposal was right: a weak test"
    assert totals["handoff_windows"] == 52
    assert totals["handoff_accepted"] > 0.3 * 52, "windows from the prefill engine are worse than those that follow"
    assert totals["tokens_drafted"] == totals["windows"] * (speculating.width - 1)
    assert totals["tokens_accepted"] == sum(totals[f"accepted_at_{k}"] for k in range(1, speculating.width))
    await assert_nothing_left(speculating.mesh)


async def test_acceptance_is_told_with_each_answer_and_in_the_metrics(speculating: Speculating):
    async with httpx.AsyncClient(base_url=speculating.mesh.url, timeout=60) as client:

        async def counted() -> dict[str, float]:
            lines = [line.rpartition(" ") for line in (await client.get("/metrics")).text.splitlines() if line[:1] != "#"]
            return {name: float(value) for name, _, value in lines if "spec_decode" in name or "decode-scheduler" in name}

        before = await counted()
        body = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
        usages = [
            (await client.post("/v1/completions", json=body | {"prompt": prompt})).json()["usage"]
            for prompt in prompts(3, [5, 130], VOCAB, 10)
        ]
        after = {name: value - before.get(name, 0) for name, value in (await counted()).items()}
    told = [usage["completion_tokens_details"] for usage in usages]
    accepted = sum(usage["accepted_prediction_tokens"] for usage in told)
    proposed = accepted + sum(usage["rejected_prediction_tokens"] for usage in told)
    assert accepted > 0 and all(usage["accepted_prediction_tokens"] >= 0 for usage in told)
    labels = '{engine="decode-0",service="decode-scheduler"}'
    for gateway, scheduler, value in (
        ("num_accepted_tokens", "tokens_accepted", accepted),
        ("num_draft_tokens", "tokens_drafted", proposed),
        ("num_drafts", "windows", proposed / (speculating.width - 1)),
    ):
        assert after[f"k3mesh_spec_decode_{gateway}_total"] == value
        assert after[f"k3mesh_scheduler_{scheduler}_total{labels}"] == value
    at = [
        after[f'k3mesh_spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}}'] for k in range(speculating.width - 1)
    ]
    assert sum(at) == accepted and at == sorted(at, reverse=True)
    assert at == [after[f"k3mesh_scheduler_accepted_at_{k}_total{labels}"] for k in range(1, speculating.width)]
    assert after["k3mesh_spec_decode_acceptance_length_count"] == 3


@pytest.mark.timeout(240)
async def test_sampled_tokens_are_those_of_decoding_one_by_one(speculating: Speculating, oracle: Oracle):
    rule = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=11)
    how = {"temperature": rule.temperature, "top_p": rule.top_p, "top_k": rule.top_k, "seed": rule.seed, "ignore_eos": True}
    answers = await complete_all(speculating.mesh, prompts(13, LENGTHS, VOCAB, 6), max_tokens=12, at_once=8, **how)
    right = 0
    for answer in answers:
        rows = torch.from_numpy(oracle.logits([*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 : -1])
        places = range(len(answer.prompt), len(answer.prompt) + 12)
        right += sum(a == b for a, b in zip(sample(rows, [rule] * 12, list(places)), answer.tokens, strict=True))
    assert right >= 13 * 12 - 1  # a coin may fall on the edge that rounding moves


async def test_a_budget_or_a_stop_token_inside_a_window_ends_there(speculating: Speculating):
    request = prompts(1, [40], VOCAB, 7)
    (whole,) = await complete_all(speculating.mesh, request, max_tokens=24, at_once=1, ignore_eos=True)
    for budget in (1, 2, 3, 5, 8, 9, 10):
        (answer,) = await complete_all(speculating.mesh, request, max_tokens=budget, at_once=1, ignore_eos=True)
        assert (answer.tokens, answer.finish_reason) == (whole.tokens[:budget], "length")
    for stop in {whole.tokens[n] for n in (1, 4, 7)}:
        end = whole.tokens.index(stop) + 1
        (answer,) = await complete_all(
            speculating.mesh, request, max_tokens=24, at_once=1, ignore_eos=True, stop_token_ids=[stop]
        )
        assert (answer.tokens, answer.finish_reason) in [(whole.tokens[:n], "stop") for n in (end, end - 1)]
    await assert_nothing_left(speculating.mesh)


async def test_clients_that_leave_during_rounds_leave_nothing_and_disturb_nobody(speculating: Speculating):
    request = prompts(1, [130], VOCAB, 8)
    (undisturbed,) = await complete_all(speculating.mesh, request, max_tokens=20, at_once=1, ignore_eos=True)

    async def leave(client: httpx.AsyncClient, prompt: list[int], after: int) -> None:
        body = {"prompt": prompt, "stream": True, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: ")
                if seen > after:
                    return

    async with httpx.AsyncClient(base_url=speculating.mesh.url, timeout=60) as client:
        leaving = [leave(client, prompt, n % 5) for n, prompt in enumerate(prompts(10, [1, 130, 300], VOCAB, 9))]
        staying = complete_all(speculating.mesh, request * 3, max_tokens=20, at_once=3, ignore_eos=True)
        *_, stayed = await asyncio.gather(*leaving, staying)
    assert [answer.tokens for answer in stayed] == [undisturbed.tokens] * 3
    await assert_nothing_left(speculating.mesh)
