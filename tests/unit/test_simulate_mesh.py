"""The simulator as a whole: real planners in virtual time."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from k3mesh.cli.main import run as k3mesh
from services.contracts.geometry import PAGED, SLOT, blocks_for
from services.contracts.mesh import MeshArguments
from services.simulate.constants import FOLDER, load
from services.simulate.costs import Chunk, Round
from services.simulate.kernels import KernelCosts
from services.simulate.main import SimArguments, run
from services.simulate.mesh import Mesh
from services.simulate.record import Record
from services.simulate.report import Report
from services.simulate.workload import Asked
from tests.lib.k3 import K3_FOLDER
from tests.lib.simulation import constants_file

DEMO = K3_FOLDER.parent / "demo"


def laptop(folder: Path, asked: Sequence[Asked], *flags: str, **costs: Any) -> tuple[Mesh, list[Record], Report]:
    """A run of the laptop's topology in which all takes no time, except what is named."""
    words = ["--topology", "laptop", "--model", str(DEMO), "--constants", str(constants_file(folder, **costs)), *flags]
    return run(SimArguments.parse(words), asked)


def idle(mesh: Mesh) -> bool:
    """Nothing is held any more, and every invariant holds."""
    for cell in mesh.cells:
        cell.prefill.planner.check()
        cell.decode.planner.check()
    held = [*mesh.cells[0].prefill.planner.counters().items(), *mesh.cells[0].decode.planner.counters().items()]
    return not any(count for name, count in held if "verify_width" not in name)


def test_the_time_of_one_request_is_the_sum_of_its_way(tmp_path: Path):
    """Chunks of 256, 256, 128 and 60 through 4 stages of 10 ms, hops of 1 ms; 9 rounds of 5 ms, each planned while
    the one before it runs; every message at its price."""
    costs = dict(stage_step_s=0.010, hop_s=0.001, replica_round_s=0.005, client_s=0.1, schedulers_s=0.01, agents_s=0.02)
    asked = [Asked(1.0, 700, 10)]
    _, (record,), it = laptop(tmp_path, asked, **costs, step_s=0.0001, round_s=0.0004, transfer_s=0.0002)
    assert record.sent == 1.0
    assert record.reserved == pytest.approx(1.0 + 0.1 + 0.01)
    assert record.started == pytest.approx(record.reserved + 0.02)
    assert record.prefilled == pytest.approx(record.started + 0.0001 + 4 * 0.010 + 3 * (0.010 + 0.001))
    assert record.transferred == pytest.approx(record.prefilled + 0.0002, abs=2e-4)
    assert record.first_token == pytest.approx(max(record.transferred, record.reserved + 0.01 + 0.2) + 0.1, abs=2e-4)
    assert record.finished - record.first_token == pytest.approx(9 * 0.005 + 0.0004, abs=1e-9)
    assert (it.steps, it.chunks, it.rounds, it.output_tokens) == (4, 4, 9 + 1, 10)  # the last round clears its place
    assert it.tpot_p50_s == pytest.approx(0.005 + 0.0004 / 9)


@pytest.mark.parametrize("batches", [1, 4, 12])
def test_equal_stages_are_used_as_the_bubble_bound_says(batches: int, tmp_path: Path):
    """scheduling §2.3: B / (B + 3) for B batches in a burst over 4 stages."""
    _, _, it = laptop(tmp_path, [Asked(0.0, 256, 1)] * batches, "--prefill=--no-enable-prefix-caching", stage_step_s=0.5)
    assert it.steps == batches
    assert [1 - bubbles for bubbles in it.stage_bubbles] == [pytest.approx(batches / (batches + 3))] * 4


def test_what_is_handed_over_is_what_the_cache_table_says(tmp_path: Path):
    asked = [Asked(0.1 * n, prompt, 5) for n, prompt in enumerate((1, 127, 128, 129, 500, 1100))]
    mesh, records, it = laptop(tmp_path, asked, "--topology", "laptop-tp2", stage_step_s=0.01, replica_round_s=0.01)
    geometry = mesh.shape.decode_geometry
    block, slot = (geometry.bytes_of_stage(0, kind) for kind in (PAGED, SLOT))
    for record in records:
        assert record.bytes == 2 * (blocks_for(record.asked.prompt_tokens) * block + slot)
    assert it.transferred_bytes == sum(record.bytes for record in records)
    assert idle(mesh)


def test_a_prefix_that_decode_has_is_neither_computed_nor_sent_again(tmp_path: Path):
    asked = [Asked(float(n), 600, 5, "shared", 512) for n in range(2)]
    mesh, (first, second), _ = laptop(tmp_path, asked, stage_step_s=0.01, replica_round_s=0.01)
    geometry = mesh.shape.decode_geometry
    assert first.bytes - second.bytes == 4 * geometry.bytes_of_stage(0, PAGED)
    assert mesh.cells[0].prefill.planner.totals["prefix_cache_hits"] == 512


def test_a_first_token_that_is_the_last_ends_on_prefill_and_frees_both_sides(tmp_path: Path):
    mesh, records, it = laptop(tmp_path, [Asked(0.0, 300, 1), Asked(0.0, 200, 3)], stage_step_s=0.01, replica_round_s=0.01)
    assert [record.tokens for record in records] == [1, 3]
    assert it.finished == 2
    assert idle(mesh)


def test_requests_beyond_the_queue_are_told_so_and_the_others_end(tmp_path: Path):
    mesh, records, it = laptop(tmp_path, [Asked(0.0, 64, 2)] * 600, stage_step_s=0.01, replica_round_s=0.001)
    assert it.failures == {"overloaded": it.failed} and 0 < it.failed < 100
    assert it.finished == 600 - it.failed and all(record.tokens == 2 for record in records if not record.failure)
    assert idle(mesh)


def test_so_many_at_once_means_no_more(tmp_path: Path):
    _, records, it = laptop(tmp_path, [Asked(0.0, 64, 4)] * 50, "--at-once", "3", stage_step_s=0.01, replica_round_s=0.01)
    assert it.finished == 50
    for record in records:
        assert sum(other.sent <= record.sent < other.finished for other in records) <= 3


def test_a_window_gives_as_many_tokens_as_the_drafter_is_right(tmp_path: Path):
    """Half of the windows have a right first proposal, a quarter a second one: 1.75 tokens a round."""
    more = f"--speculative-algorithm DSPARK --speculative-draft-model-path {DEMO}/dspark"
    flags = [f"--prefill={more}", f"--decode={more} --no-speculative-adaptive"]
    asked = [Asked(0.01 * n, 100, 400) for n in range(30)]
    mesh, _, it = laptop(tmp_path, asked, *flags, acceptance=[0.5, 0.25], stage_step_s=0.01, replica_round_s=0.01)
    assert it.tokens_per_row == pytest.approx(1.75, rel=0.05)
    totals = mesh.cells[0].decode.planner.totals
    assert totals["accepted_at_1"] / totals["windows"] == pytest.approx(0.5, rel=0.05)
    assert totals["accepted_at_3"] == 0
    assert it.output_tokens == 30 * 400


def test_a_request_that_makes_way_comes_back_after_its_copies(tmp_path: Path):
    """Two answers for which the blocks do not suffice: one waits for the other, in an image. Its copies take time."""
    flags = ["--decode=--num-blocks 12 --data-parallel-size 1 --expert-parallel-size 1"]
    times: list[float] = []
    for host_copy in (1e12, 1e6):
        costs: dict[str, float] = dict(stage_step_s=0.01, replica_round_s=0.001, host_copy_bytes_per_s=host_copy)
        mesh, records, it = laptop(tmp_path, [Asked(0.0, 100, 800)] * 2, *flags, **costs)
        assert it.retractions == mesh.cells[0].decode.planner.totals["restores"] == 1
        assert it.finished == 2 and [record.tokens for record in records] == [800, 800]
        assert idle(mesh)
        times.append(it.wall_s)
    image = 2 * mesh.shape.decode_geometry.slot_bytes  # at least, out and in
    assert times[1] - times[0] > image / 1e6


def test_blocks_that_run_out_are_counted(tmp_path: Path):
    flags = ["--decode=--num-blocks 12 --data-parallel-size 1 --expert-parallel-size 1 --retraction-snapshot-ratio 0"]
    _, _, it = laptop(tmp_path, [Asked(0.0, 100, 800)] * 2, *flags, stage_step_s=0.01, replica_round_s=0.001)
    assert it.capacity_aborts == 1 and it.failures == {"capacity_aborted": 1}


def test_equal_arguments_give_equal_reports_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["sim", "--requests", "60", "--rate", "4", "--plots", str(tmp_path / "page.html"), "--json"]
    pages: list[str] = []
    outputs: list[dict[str, Any]] = []
    for seed in ("1", "1", "2"):
        assert k3mesh([*words, "--seed", seed]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
        pages.append((tmp_path / "page.html").read_text())
    assert outputs[0] == outputs[1] != outputs[2] and pages[0] == pages[1]
    assert {"requests", "finished", "wall_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s"} <= outputs[0].keys()
    assert (outputs[0]["requests"], outputs[0]["finished"]) == (60, 60)
    charts = re.findall("<svg.*?</svg>", pages[0])
    assert len(charts) >= 6 and all(list(ElementTree.fromstring(chart)) for chart in charts)
    assert "http" not in pages[0]


@pytest.mark.parametrize("topology", ["laptop", "laptop-tp2", "k3"])
def test_each_topology_has_constants_of_its_own(topology: str, capsys: pytest.CaptureFixture[str]):
    words = ["--requests", "5", "--lengths", "fixed:300", "--outputs", "fixed:4"]
    assert k3mesh(["sim", "--topology", topology, *words]) == 0
    assert "5 requests, 5 finished, 0 failed" in capsys.readouterr().out


def test_partitions_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = ["sim", "--requests", "40", "--plots", str(tmp_path / "p.html"), "--partitions", "24,23,23,23", "24,24,24,21"]
    assert k3mesh([*words, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["partitions"]
    assert list(compared) == ["24,23,23,23", "24,24,24,21"]
    assert len({it["prompt_tokens"] for it in compared.values()}) == 1
    assert compared["24,24,24,21"]["stage_utilisation"][3] < compared["24,23,23,23"]["stage_utilisation"][3]
    assert k3mesh(words) == 0
    assert "24,24,24,21" in capsys.readouterr().out
    assert k3mesh(["sim", "--partitions", "24,23,23"]) == 2
    assert k3mesh(["sim", "--partitions"]) == 2


def test_a_scaled_mesh_serves_as_many_times_the_requests_as_fast(capsys: pytest.CaptureFixture[str]):
    """Four cells with four times the arrivals: each cell has what one alone would have."""
    found: list[dict[str, Any]] = []
    for scale, rate, requests in ((1, 3, 60), (4, 12, 240)):
        words = ["sim", "--scale", str(scale), "--rate", str(rate), "--requests", str(requests), "--arrivals", "uniform"]
        assert k3mesh([*words, "--lengths", "fixed:2000", "--outputs", "fixed:100", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, four = found
    assert four["finished"] == 240
    assert four["output_tokens_per_s"] == pytest.approx(4 * one["output_tokens_per_s"], rel=0.05)
    assert four["output_tokens_per_s_per_node"] == pytest.approx(one["output_tokens_per_s_per_node"], rel=0.05)
    assert four["ttft_p50_s"] == pytest.approx(one["ttft_p50_s"], rel=0.05)


def test_kernel_costs_contain_the_measured_kernels():
    """92 layers x 303 us of experts in a full decode round; a floor of about 10 ms for what goes between nodes (moe-ep §1)."""
    words = ["--topology", "k3", "--model", str(K3_FOLDER)]
    values = load(FOLDER / "h200.json")
    costs = KernelCosts(values, *MeshArguments.parse(words).engines())
    full = max(costs.round(Round(32, 8, 7, (32,) * 4, (0,) * 4)))
    assert full > 92 * 303e-6 + 0.010
    empty = max(costs.round(Round(1, 1, 0, (1,) * 4, (0,) * 4)))
    assert empty < full and empty > 92 * 114e-6  # the experts' weights are read in any case
    longer = max(costs.round(Round(32, 8, 7, (32,) * 4, (32 * 8192,) * 4)))
    assert longer - full == pytest.approx((24 + 5) * 117e-6, rel=0.02)  # FlashMLA: 117 us a layer
    chunk = costs.stage(1, [Chunk(0, 8192, False)])
    assert chunk > 23 * 5.19e-3 and costs.stage(1, [Chunk(8192, 16384, False)]) > chunk
    assert costs.stage(3, [Chunk(0, 8192, True)]) > costs.stage(3, [Chunk(0, 8192, False)])
    assert [round(costs.hop(stage, 8192) * values.number("nic_bytes_per_s") / 8192) for stage in range(3)] == [
        43_008 + 28_672, 71_680 + 28_672, 100_352 + 28_672,
    ]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_ten_thousand_requests_on_64_gpus_end_within_two_minutes(capsys: pytest.CaptureFixture[str]):
    assert k3mesh(["sim", "--requests", "10000", "--rate", "6", "--json"]) == 0
    it = json.loads(capsys.readouterr().out)
    assert it["finished"] == it["requests"] == 10_000
