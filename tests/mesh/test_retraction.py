"""Answers that outgrow the decode cache: requests make way and come back, and no token tells."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.speculative.sampling import Sampling, sample
from tests.lib.drafted import SMALL
from tests.lib.load import Answer, assert_nothing_left, attempt, prompts
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.oracle import Oracle
from tests.lib.predictable import predictable

VOCAB, LONG = 512, 700  # more than what admission keeps free for a request
FEW = (
    "--num-blocks 12 --max-num-seqs 8 --low-latency-max-num-tokens-per-gpu 32"  # a replica lets two in, and one fits to its end
)
WARM = Sampling(temperature=0.5, top_p=0.9, top_k=50, seed=11)
SAMPLED = {"temperature": WARM.temperature, "top_p": WARM.top_p, "top_k": WARM.top_k, "seed": WARM.seed}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with its NextN layer, and a DSpark drafter; both drafters are mostly right, so that long answers come soon."""
    flags = [word for word in SMALL if word != "--no-tokenizer"]
    return predictable(tmp_path_factory.mktemp("retraction"), *flags, share=0.005)


@pytest.fixture(scope="module")
def oracle(checkpoints: tuple[Path, Path]) -> Oracle:
    return Oracle(checkpoints[0])


def flags_of(algorithm: str, drafter: Path) -> str:
    if not algorithm:
        return ""
    width = 8 if algorithm == "DSPARK" else 4
    flags = f"--speculative-algorithm {algorithm} --speculative-num-draft-tokens {width}"
    return flags + f" --speculative-draft-model-path {drafter}" if algorithm == "DSPARK" else flags


async def retractions(mesh: Mesh) -> dict[str, int]:
    totals = (await mesh.inspect())["decode-0.scheduler"].totals
    return {name: totals[name] for name in ("retractions", "restores", "capacity_aborts")}


def misplaced(oracle: Oracle, answer: Answer) -> int:
    """Sampled tokens that are not those of decoding one by one."""
    rows = torch.from_numpy(oracle.logits([*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 : -1])
    places = range(len(answer.prompt), len(answer.prompt) + len(answer.tokens))
    alone = sample(rows, [WARM] * len(answer.tokens), list(places))
    return sum(a != b for a, b in zip(alone, answer.tokens, strict=True))


SHAPES = {  # replicas, topology, more flags of prefill and decode
    "one replica": (1, "laptop", "--pipeline-parallel-size 1", "--data-parallel-size 1 --expert-parallel-size 1"),
    "two replicas": (2, "laptop", "", ""),
    "two replicas of two ranks": (2, "laptop-tp2", "", ""),
}


def combinations() -> list[Any]:
    """A few in every run; the others, and those whose rounds change their width, in `make soak`."""
    always = {("one replica", "", True), ("one replica", "DSPARK", False)}  # MTP: tests/faults/test_retraction_faults.py
    every = [
        (shape, algorithm, adaptive) for shape in SHAPES for algorithm in ("", "DSPARK", "MTP") for adaptive in (True, False)
    ]
    names = [f"{shape}, {algorithm or 'no drafter'}{', adaptive' * adaptive}" for shape, algorithm, adaptive in every]
    sensible = [(it, name) for it, name in zip(every, names, strict=True) if it[1] or it[2]]
    return [pytest.param(*it, id=name, marks=() if it in always else pytest.mark.soak) for it, name in sensible]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("shape", "algorithm", "adaptive"), combinations())
async def test_no_token_depends_on_who_made_way(
    checkpoints: tuple[Path, Path], oracle: Oracle, shape: str, algorithm: str, adaptive: bool
):
    target, drafter = checkpoints
    replicas, topology, prefill, decode = SHAPES[shape]
    flags = flags_of(algorithm, drafter)
    width = "" if adaptive else "--no-speculative-adaptive"
    engines = (f"--prefill={prefill} {flags}", f"--decode={FEW} {decode} {flags} {width}")
    with running_mesh(target, "--topology", topology, *engines) as mesh:
        for how in ({}, SAMPLED):  # of one kind, so that they grow at one pace
            before = await retractions(mesh)
            requests = prompts(2 * replicas, [40, 100], VOCAB, 31)
            answers = await asyncio.gather(*(attempt(mesh, prompt, LONG, **how) for prompt in requests))
            told = {name: count - before[name] for name, count in (await retractions(mesh)).items()}
            assert told["retractions"] == told["restores"] >= replicas and told["capacity_aborts"] == 0
            for answer in answers:
                assert isinstance(answer, Answer) and len(answer.tokens) == LONG, answer
                if how:
                    assert misplaced(oracle, answer) <= 1  # a coin may fall on the edge that rounding moves
                else:
                    oracle.assert_greedy(answer.prompt, answer.tokens)
        await assert_nothing_left(mesh)
