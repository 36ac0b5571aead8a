"""Drafters over every stage boundary, shard and chunk against the numpy oracle."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3mesh.errors import Internal
from services.worker.model.batch import Hop
from services.worker.speculative.context_producer import ContextSum, DSparkContextProducer
from tests.lib.drafted import Checkpoints, DraftedEngine
from tests.lib.golden import golden_model, make_batch, request, topology_of

EXACT = 1e-4
FLOAT32_ROUNDING = 1e-6
PROMPT = [(13 * n + n * n // 7) % 512 for n in range(141)]
STREAMS = pytest.mark.parametrize(("stream", "fc_norm"), [(s, n) for s in ("prefix", "attn_res") for n in (False, True)])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    torch.set_num_threads(1)
    return Checkpoints(tmp_path_factory.mktemp("drafters"))


def engine(checkpoints: Checkpoints, folder: Path, partition=(), tp: int = 1, **more) -> DraftedEngine:
    topology = topology_of(golden_model(str(checkpoints.target)), partition=partition, tp=tp)
    return DraftedEngine(checkpoints.target, folder, topology, **more)


def prefill(target: DraftedEngine, chunks: list[int], anchor: int, slot: int = 1, prompt: list[int] = PROMPT):
    """Runs the prompt in chunks -> its request and, of each rank of the last stage, the proposals behind `anchor`."""
    sequence = request([*prompt, *[0] * 8], slot=slot)
    result: list = []
    for count in chunks:
        batch = make_batch([(sequence, count)], "extend")
        sequence.done += count
        following = torch.tensor([*prompt[1:], anchor])[sequence.done - count : sequence.done]
        ends = [count - 1] if sequence.done == len(prompt) else []
        result = target.run(batch, following, torch.tensor(ends, dtype=torch.long))
    return sequence, [proposals for _, proposals in result]


def cached(target: DraftedEngine, layer: int, blocks: list[int], count: int, rank: int = -1) -> np.ndarray:
    pool = target.caches[rank].draft[target.model.num_hidden_layers + layer]
    return torch.cat([pool[block, :, 0] for block in blocks])[:count].double().numpy()


def assert_near(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert np.linalg.norm(actual - wanted) / np.linalg.norm(wanted) < EXACT


@STREAMS
@pytest.mark.parametrize("partition", [(6,), (1, 5), (2, 4), (3, 3), (4, 2), (5, 1), (1,) * 6], ids=str)
def test_context_rows_over_a_pipeline_equal_the_concatenated_projection(
    checkpoints: Checkpoints, stream: str, fc_norm: bool, partition: tuple[int, ...]
):
    folder = checkpoints.dspark("0,2,5", stream, fc_norm)
    target = engine(checkpoints, folder, partition)
    sequence, (proposals,) = prefill(target, [100, 41], anchor=7)
    oracle = checkpoints.dspark_oracle(folder)
    context = oracle.context(PROMPT)
    for layer in range(2):
        assert_near(cached(target, layer, sequence.blocks, len(PROMPT)), oracle.rows(context, layer))
    assert proposals.tolist() == [oracle.propose(PROMPT, 7, 7)]


@STREAMS
@pytest.mark.parametrize("partition", [(6,), (1, 5), (2, 4), (3, 3), (4, 2), (5, 1), (1,) * 6], ids=str)
def test_the_sum_over_the_stages_is_the_projection_of_all_taps_at_once_but_for_float32_rounding(
    checkpoints: Checkpoints, stream: str, fc_norm: bool, partition: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    folder = checkpoints.dspark("0,2,5", stream, fc_norm)
    target = engine(checkpoints, folder, partition)
    taps: dict[int, torch.Tensor] = {}
    sums: list[torch.Tensor] = []
    take, write = ContextSum.take, DSparkContextProducer.write

    def recorded(self: ContextSum, index: int, rows: torch.Tensor) -> None:
        taps[index] = rows.double()
        take(self, index, rows)

    def finished(self: DSparkContextProducer, context: ContextSum, *where: torch.Tensor) -> None:
        sums.append(context.total.double())
        write(self, context, *where)

    monkeypatch.setattr(ContextSum, "take", recorded)
    monkeypatch.setattr(DSparkContextProducer, "write", finished)
    prefill(target, [141], anchor=7)
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    if fc_norm:
        taps = {
            index: rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"fc_norm.{index}.weight"]
            for index, rows in taps.items()
        }
    whole = torch.cat([taps[index] for index in range(3)], -1) @ weights["context_proj.weight"].T
    (total,) = sums
    assert float((total - whole).norm() / whole.norm()) < FLOAT32_ROUNDING


@pytest.mark.parametrize("taps", ["0", "5", "2,3", "0,1,2,3,4,5"])
@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_any_set_of_taps_is_captured(checkpoints: Checkpoints, taps: str, stream: str):
    folder = checkpoints.dspark(taps, stream, True)
    _, (proposals,) = prefill(engine(checkpoints, folder, (3, 3)), [141], anchor=3)
    assert proposals.tolist() == [checkpoints.dspark_oracle(folder).propose(PROMPT, 3, 7)]


@pytest.mark.parametrize("chunks", [[141], [128, 13], [1, 140], [140, 1], [47, 47, 47]], ids=str)
def test_proposals_do_not_depend_on_chunks(checkpoints: Checkpoints, chunks: list[int]):
    folder = checkpoints.dspark()
    _, (proposals,) = prefill(engine(checkpoints, folder), chunks, anchor=100)
    assert proposals.tolist() == [checkpoints.dspark_oracle(folder).propose(PROMPT, 100, 7)]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_narrower_window_asks_for_a_narrower_block(checkpoints: Checkpoints, width: int):
    folder = checkpoints.dspark()
    _, (proposals,) = prefill(engine(checkpoints, folder, width=width), [141], anchor=9)
    assert proposals.tolist() == [checkpoints.dspark_oracle(folder).propose(PROMPT, 9, width - 1)]


@pytest.mark.parametrize(("partition", "tp"), [((), 2), ((3, 3), 2), ((2, 4), 4)], ids=str)
@pytest.mark.parametrize("algorithm", ["DSPARK", "MTP"])
def test_tensor_parallel_ranks_agree_on_rows_and_proposals(checkpoints: Checkpoints, partition, tp: int, algorithm: str):
    folder = checkpoints.dspark() if algorithm == "DSPARK" else checkpoints.target
    oracle = checkpoints.dspark_oracle(folder) if algorithm == "DSPARK" else checkpoints.nextn_oracle()
    target = engine(checkpoints, folder, partition, tp, algorithm=algorithm)
    sequence, proposals = prefill(target, [100, 41], anchor=7)
    assert all(p.tolist() == [oracle.propose(PROMPT, 7, 7)] for p in proposals)
    first, *others = [cached(target, 0, sequence.blocks, 141, rank) for rank in range(-tp, 0)]
    assert all(np.array_equal(first, other) for other in others)


def test_two_prompts_of_one_batch_get_the_proposals_that_each_gets_alone(checkpoints: Checkpoints):
    folder = checkpoints.dspark()
    target, oracle = engine(checkpoints, folder, num_blocks=8), checkpoints.dspark_oracle(folder)
    first, second = request([*PROMPT[:130], *[0] * 8], slot=1), request([*PROMPT[60:90], *[0] * 8], slot=2, first_block=4)
    batch = make_batch([(first, 130), (second, 30)], "extend")
    ((_, proposals),) = target.run(batch, torch.zeros(160, dtype=torch.long), torch.tensor([129, 159]))
    assert proposals.tolist() == [oracle.propose(PROMPT[:130], 0, 7), oracle.propose(PROMPT[60:90], 0, 7)]


def test_a_causal_block_sees_no_later_row(checkpoints: Checkpoints, tmp_path: Path):
    folder = checkpoints.dspark("1,4")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_act"', '"block_causal": true, "hidden_act"'))
    _, (proposals,) = prefill(engine(checkpoints, folder), [141], anchor=11)
    assert proposals.tolist() == [checkpoints.dspark_oracle(folder).propose(PROMPT, 11, 7)]


@pytest.mark.parametrize("partition", [(6,), (3, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("chunks", [[141], [128, 13], [1, 140], [70, 71]], ids=str)
def test_nextn_proposes_what_the_oracle_does(checkpoints: Checkpoints, partition: tuple[int, ...], chunks: list[int]):
    target = engine(checkpoints, checkpoints.target, partition, algorithm="MTP")
    assert [drafter is not None for drafter in target.drafters] == [*[False] * (len(partition) - 1), True]
    _, (proposals,) = prefill(target, chunks, anchor=42)
    assert proposals.tolist() == [checkpoints.nextn_oracle().propose(PROMPT, 42, 7)]


def test_a_wrong_context_sum_is_refused(checkpoints: Checkpoints):
    target = engine(checkpoints, checkpoints.dspark(), (3, 3))
    first, last = target.drafters
    assert first is not None and last is not None
    hop = Hop(torch.zeros(2, 64), torch.zeros(1, 2, 64))
    capture = last.begin(2, Hop(hop.prefix, hop.blocks, torch.zeros(2, 64)))
    assert isinstance(capture, ContextSum)
    for drafter, incoming in [
        (last, hop),
        (last, None),
        (last, Hop(hop.prefix, hop.blocks, torch.zeros(3, 64))),
        (last, Hop(hop.prefix, hop.blocks, torch.zeros(2, 64, dtype=torch.float64))),
        (first, capture.onto(hop)),
    ]:
        with pytest.raises(Internal) as refused:
            drafter.begin(2, incoming)
        assert refused.value.detail == "CTX_ACC"
    with pytest.raises(Internal) as refused:
        capture.take(1, torch.zeros(3, 64))
    assert refused.value.detail == "CTX_ROWS"
