"""Replicas whose experts are spread over all of them, with widths of their own: rounds stay in step, no token changes."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from services.contracts.geometry import verify_widths
from services.contracts.topology import Topology
from services.worker.parallel.groups import Groups
from services.worker.speculative.sampling import Sampling
from tests.lib.drafted import Checkpoints, Job, SpeculativeRank
from tests.lib.ranks import Ranks

REPLICAS, TOKENS = 2, 36
RULES = [Sampling(0.0, 1.0, 0, 0), Sampling(0.9, 0.95, 40, 11)]
WIDTH = {"DSPARK": 8, "MTP": 4}


def job_of(replica: int) -> Job:
    prompt = torch.randint(0, 256, (90 + 30 * replica,), generator=torch.Generator().manual_seed(replica)).tolist()
    return Job(prompt, rule=RULES[replica])


def rounds_of(
    groups: Groups, target: Path, folder: Path, algorithm: str, truths: list[list[int]], seed: int
) -> tuple[list[int], set[tuple[int, int]]]:
    """One replica's tokens, and the (own, widest) widths that its rounds drafted for."""
    rank = SpeculativeRank(target, folder, algorithm, WIDTH[algorithm], groups)
    me, random, widths = groups.ep.rank, Random(seed), verify_widths(rank.width)
    job = job_of(me)
    assert rank.forced is not None
    first = rank.start(job)
    rank.forced.truth[job.slot] = [*job.prompt, *truths[me]]
    tokens, installs, drafted = [first.token], [rank.install(job, first)], set[tuple[int, int]]()
    following = [rank.width] * REPLICAS
    for _ in range(TOKENS):  # a token a round at least; both replicas play the same dice
        width, following = following, [random.choice(widths) for _ in range(REPLICAS)]
        rank.forced.hits[job.slot] = [[0, 1, 2, 9][(random.randrange(4) + me) % 4]]
        idle = me == 1 and len(tokens) > TOKENS
        done = rank.round([] if idle else [job], installs, (), width[me], following[me], max(following))
        tokens += [] if idle else done.tokens[0].tokens
        installs = []
        drafted.add((following[me], max(following)))
    return tokens, drafted


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def truths(checkpoints: Checkpoints) -> list[list[int]]:
    plain = SpeculativeRank(checkpoints.target, None)
    return [plain.generate(job_of(replica), TOKENS * 3)[0] for replica in range(REPLICAS)]


@pytest.fixture(scope="module")
def ranks(checkpoints: Checkpoints) -> Iterator[Ranks]:
    layers = SpeculativeRank(checkpoints.target, None).model.num_hidden_layers
    ranks = Ranks(Topology("decode", 1, REPLICAS, 1, REPLICAS, layers, (layers,)))
    yield ranks
    ranks.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", ["DSPARK", "MTP"])
def test_replicas_of_different_widths_keep_their_tokens(
    checkpoints: Checkpoints, truths: list[list[int]], ranks: Ranks, algorithm: str
):
    folder = checkpoints.dspark() if algorithm == "DSPARK" else checkpoints.target
    for (tokens, drafted), truth in zip(
        ranks.run(rounds_of, checkpoints.target, folder, algorithm, truths, 3), truths, strict=True
    ):
        assert len(tokens) > TOKENS
        count = min(len(tokens), len(truth))
        assert tokens[:count] == truth[:count]
        assert any(own < widest for own, widest in drafted) and (1, WIDTH[algorithm]) in drafted
