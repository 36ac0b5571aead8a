"""CUDA graphs of decode rounds against eager rounds of the same small model, and both against the CPU's."""

from pathlib import Path

import pytest
import torch

from services.worker.cache.slots import SlotStates
from services.worker.round_check import CheckedRounds
from services.worker.round_graphs import CudaRecorder
from tests.lib.drafted import Checkpoints, SpeculativeRank
from tests.lib.graph_rounds import capture, play, replay
from tests.lib.static_ops import static

pytestmark = pytest.mark.gpu(1)
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(Path(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("kind", ["plain", "dspark", "nextn"])
def test_replays_are_eager_rounds_whoever_lives_and_however_wide(checkpoints: Checkpoints, kind: str):
    kinds = {
        "plain": (checkpoints.target, None),
        "dspark": (checkpoints.target, checkpoints.dspark("1,3,5", "attn_res", True)),
        "nextn": (checkpoints.target, checkpoints.target, "MTP", 4),
    }
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = SpeculativeRank(*kinds[kind])
    ranks = on_cpu, SpeculativeRank(*kinds[kind], device=GPU, change=static)
    assert play(ranks, 12, seed=4) > 20, "eager"
    graphs = capture(ranks[1], CudaRecorder(GPU), GPU)
    assert play(ranks, 24, seed=1) > 60
    replay(ranks[1], CheckedRounds(graphs, ranks[1].decode.part, SlotStates(ranks[1].caches)))
    assert play(ranks, 12, seed=2) > 20
