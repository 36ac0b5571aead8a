"""The whole model spread over real processes, every collective over gloo, against the independent one-process forward."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.contracts.geometry import Geometry
from services.contracts.model import ModelConfig, parse_model_config
from services.contracts.topology import Topology
from services.launch.make_checkpoint import main as make_checkpoint
from services.worker.hop import StageBoundary
from services.worker.model.backends import choose_ops
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import Groups
from tests.lib.golden import make_batch, make_caches, request
from tests.lib.oracle import Oracle
from tests.lib.ranks import Ranks

PROMPT = [(7 * n * n + 3 * n) % 700 for n in range(45)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    assert make_checkpoint([str(directory)]) == 0
    return directory


def model_of(checkpoint: Path) -> ModelConfig:
    return parse_model_config(json.loads((checkpoint / "config.json").read_text()), "config.json")


@dataclass
class Rank:
    """One rank's stage and its boundary."""

    stage: DecoderStage
    boundary: StageBoundary
    groups: Groups

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of all rows on the last stage."""
        out = self.stage.forward(batch, self.boundary.receive(len(batch.tokens)), lambda _: None)
        if isinstance(out, Hop):
            self.boundary.send(out)
            self.groups.pipeline.flush()
            return None
        return self.stage.logits(out)


def build(groups: Groups, checkpoint: Path, topology: Topology, rank: int) -> Rank:
    model, place = model_of(checkpoint), topology.place_of(rank)
    ops, _ = choose_ops(model, topology, "cpu", torch.float32, torch.float32)
    weights = load_stage_weights(checkpoint, model, topology, place, torch.float32)
    caches = make_caches(Geometry(model, topology, "float32"), place.stage, num_blocks=4, num_slots=4)
    experts = GlooExperts(groups.ep, model.num_experts, capacity=8, shuffle=rank)
    stage = DecoderStage(model, topology, place, weights, caches, groups.tp, experts, ops)
    return Rank(stage, StageBoundary(groups.pipeline, model, place, torch.float32), groups)


def global_rank(groups: Groups) -> int:
    """Of this process: the stages group holds one rank of each stage."""
    return groups.stages.ranks[groups.stages.rank]


def prefill(groups: Groups, checkpoint: Path, topology: Topology, chunks: list[int]) -> torch.Tensor | None:
    """Logits of the whole prompt, chunk by chunk, from the last stage."""
    rank = build(groups, checkpoint, topology, global_rank(groups))
    sequence, logits = request(PROMPT), []
    for count in chunks:
        batch = make_batch([(sequence, count)], "extend")
        sequence.done += count
        logits.append(rank.forward(batch))
    return None if logits[0] is None else torch.cat(logits)


def decode(groups: Groups, checkpoint: Path, topology: Topology, active: int) -> torch.Tensor:
    """Replica `active` decodes the prompt token by token, two sequences at once; the others' rounds are all padding."""
    rank = build(groups, checkpoint, topology, global_rank(groups))
    mine = topology.place_of(global_rank(groups)).dp == active
    first, second = request(PROMPT, slot=1, first_block=1), request(PROMPT[::-1], slot=2, first_block=2)
    logits = []
    for _ in PROMPT:
        rows = [(first, 1), (second, 1)] if mine else []
        batch = make_batch(rows, "decode", padding=1 if mine else 3)
        for sequence, count in rows:
            sequence.done += count
        out = rank.forward(batch)
        assert out is not None
        logits.append(out[:2])
    return torch.stack(logits, dim=1)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(scope="module", params=[(1, 4), (2, 2), (4, 1)], ids=["tp4", "pp2-tp2", "pp4"])
def prefill_topology(request: pytest.FixtureRequest) -> Topology:
    stages, tp = request.param
    partition = {1: (13,), 2: (6, 7), 4: (4, 3, 3, 3)}[stages]
    return Topology("prefill", stages, 1, tp, tp, 13, partition)


@pytest.fixture(scope="module")
def prefill_ranks(prefill_topology: Topology) -> Iterator[Ranks]:
    ranks = Ranks(prefill_topology)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("chunks", [[45], [17, 1, 27]])
def test_prefill_over_processes_computes_the_oracles_logits(
    prefill_ranks: Ranks, prefill_topology: Topology, checkpoint: Path, chunks: list[int]
) -> None:
    results = prefill_ranks.run(prefill, checkpoint, prefill_topology, chunks)
    expected = torch.from_numpy(Oracle(checkpoint).logits(PROMPT))
    before, last = results[: -prefill_topology.tp_size], results[-prefill_topology.tp_size :]
    assert all(result is None for result in before)
    for logits in last:
        assert relative_error(logits, expected) < 1e-4
        assert torch.equal(logits, last[0])


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1)])
def test_decode_beside_idle_replicas_computes_the_oracles_logits(checkpoint: Path, dp: int, tp: int) -> None:
    topology = Topology("decode", 1, dp, tp, dp * tp, 13, (13,))
    ranks = Ranks(topology)
    try:
        results = ranks.run(decode, checkpoint, topology, 1)
    finally:
        ranks.close()
    oracle = Oracle(checkpoint)
    expected = torch.stack([torch.from_numpy(oracle.logits(tokens)) for tokens in (PROMPT, PROMPT[::-1])])
    for rank in range(tp, 2 * tp):
        assert relative_error(results[rank], expected) < 1e-4
        assert torch.equal(results[rank], results[tp])
    assert all(bool(result.isfinite().all()) for result in results)
