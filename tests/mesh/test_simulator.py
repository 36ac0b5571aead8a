"""The simulator against a running mesh: it counts what the mesh counts."""

import asyncio
import json
from pathlib import Path

import pytest

from services.launch.bench.play import Script, play
from services.launch.bench.simulator import COUNTS, counts
from services.simulate.main import SimArguments, run
from services.simulate.workload import read
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.simulation import constants_file
from tests.mesh.test_bench import bench

VOCABULARY = 1024
PREFILL = "--chunked-prefill-size 128"
LED = Script("led", ((60, 60), (100, 4), (300, 3), (129, 4), (513, 2)), at_once=2)  # the first outlasts the others

SCARCE = Script("scarce", ((100, 800), (100, 800)), at_once=2)


def simulated(model: Path, script: Script, folder: Path, *flags: str) -> dict[str, int]:
    """What the simulator counts; its times are nothing like the mesh's."""
    (folder / "script.jsonl").write_text(script.lines())
    costs = constants_file(folder, stage_step_s=0.01, replica_round_s=0.02, client_s=0.001, schedulers_s=0.001, agents_s=0.003)
    words = ["--topology", "laptop", "--model", str(model), "--constants", str(costs), "--at-once", str(script.at_once), *flags]
    _, _, report = run(SimArguments.parse([*words, "--lead"]), read(folder / "script.jsonl"))
    return {name: report.as_dict()[name] for name in COUNTS}


def test_steps_chunks_rounds_and_bytes_are_the_meshs(mesh: Mesh, checkpoint: Path, tmp_path: Path):
    played = asyncio.run(play(mesh.state, LED, VOCABULARY, seed=1))
    assert [it.tokens for it in played.requests] == [output for _, output in LED.requests]
    assert counts(played) == simulated(checkpoint, LED, tmp_path, f"--prefill={PREFILL}")


@pytest.mark.soak
def test_retractions_are_the_meshs(checkpoint: Path, tmp_path: Path):
    decode = "--decode=--data-parallel-size 1 --expert-parallel-size 1 --num-blocks 12"
    with running_mesh(checkpoint, decode) as mesh:
        played = asyncio.run(play(mesh.state, SCARCE, VOCABULARY, seed=1))
    assert counts(played)["retractions"] == 1
    assert counts(played) == simulated(checkpoint, SCARCE, tmp_path, decode)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_bench_finds_equal_counts_in_every_script_and_tells_times(tmp_path: Path):
    run = bench(tmp_path, "simulator", "--json", "--repeats", "1")
    printed, told = run.communicate(timeout=890)
    assert run.returncode == 0, told
    compared = json.loads(printed)
    assert [it["script"] for it in compared] == ["burst", "sequential", "covered", "scarce"]
    assert all(it["equal"] and it["errors"].keys() == {"wall_s", "ttft_p50_s", "tpot_p50_s"} for it in compared)
