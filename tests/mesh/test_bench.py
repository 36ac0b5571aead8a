"""`k3mesh bench`: one run from the command line to the numbers, and nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.launch import make_checkpoint
from services.launch.child import ROOT
from tests.lib.mesh import short_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target with its NextN layer."""
    folder = tmp_path_factory.mktemp("bench") / "target"
    assert make_checkpoint.main([str(folder), "--draft", "nextn"]) == 0
    return folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a bench puts what it needs for a while; its name stands on every command line of its meshes."""
    with short_folder() as folder:
        yield folder


def bench(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "k3mesh.cli.main", "bench", *words]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def assert_nothing_left(folder: Path) -> None:
    assert not list(folder.iterdir())
    commands = [(path, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [path for path, command in commands if str(folder).encode() in command]


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """The JSON object of `k3mesh bench speculation` with two passes of 3 prompts; nothing of it is left."""
    run = bench(folder, "speculation", "--algorithm", "nextn", "--num-prompts", "3", "--repeats", "2", "--json", *words)
    printed, told = run.communicate(timeout=170)
    assert run.returncode == 0, told
    assert printed.count("\n") == 1 and told.count("speculation on") == told.count("speculation off") == 2
    result = json.loads(printed)
    assert result["greedy_identical"] is True and result["differing_answers"] == 0
    assert result["tokens_per_s_on"] > 0 and result["tokens_per_s_off"] > 0 and len(result["ratios"]) == 2
    assert result["tokens"] > 0 and result["rounds_off"] > 0 and sum(result["rounds_by_width"].values()) > 0
    assert_nothing_left(folder)
    return result


@pytest.mark.timeout(180)
def test_speculation_is_measured_on_the_demo_model_with_widths_that_adapt(folder: Path):
    result = measured(folder, "--adaptive", "--max-tokens", "24")
    assert result["acceptance_length"] > 1.5 and result["tokens"] <= 3 * 24
    assert sum(result["rounds_by_width"].values()) > result["rounds_by_width"]["1"] > 0, "it begins narrow and gets wider"
    assert result["rounds_on"] < result["rounds_off"]


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_fixed_width_is_kept_whatever_comes_of_it(target: Path, folder: Path):
    result = measured(folder, "--model", str(target), "--width", "4", "--max-tokens", "6")
    assert len(result["acceptance_per_position"]) == 3
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance_per_position"]), abs=1e-3)
    assert result["rounds_by_width"]["4"] > 0 == result["rounds_by_width"]["1"]
    assert result["tokens_drafted"] > result["tokens_accepted"]


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_text_that_nobody_can_foresee_has_rounds_of_width_1(target: Path, folder: Path):
    words = ["--model", str(target), "--width", "4", "--max-tokens", "48", "--adversarial", "--temperature", "1.5"]
    widths = measured(folder, *words)["rounds_by_width"]
    assert widths["1"] > 0.9 * sum(widths.values())


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_an_interrupted_bench_leaves_nothing(target: Path, folder: Path):
    run = bench(folder, "speculation", "--model", str(target), "--algorithm", "nextn", "--num-prompts", "2", "--repeats", "99")
    assert run.stderr is not None
    try:
        next(line for line in run.stderr if line.startswith("pass 1"))
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 130
    assert_nothing_left(folder)


def assert_no_child(of: int) -> None:
    """No process is left that was started to die with that one."""
    left: list[Path] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            left += [path] if f"K3MESH_PARENT={of}".encode() in path.read_bytes().split(b"\0") else []
    assert not left


@pytest.mark.timeout(180)
def test_transfer_prints_one_json_object_with_payload_and_ceiling_of_each_case_and_leaves_nothing(folder: Path):
    run = bench(folder, "transfer", "--tokens", "300,128", "--rounds", "2", "--json")
    printed, told = run.communicate(timeout=170)
    assert run.returncode == 0, told
    assert printed.count("\n") == 1 and told.count("round 2 of 2") == 2
    cases = json.loads(printed)["cases"]
    assert [case["tokens"] for case in cases] == [300, 128]
    for case, blocks in zip(cases, (3, 1), strict=True):
        # of a rank at tensor-parallel size 8: 69 KDA slots, 24 target and 5 drafter MLA layers (spec cache-and-handoff §2, §12)
        assert case["bytes"] == 56_171_520 + blocks * 128 * 33_408
        assert case["payload_gb_s"] > 0 and case["ceiling_gb_s"] > 0 and case["cpu_s_per_gb"] > 0
        assert case["ratio"] == pytest.approx(case["payload_gb_s"] / case["ceiling_gb_s"], abs=2e-3)
    assert_nothing_left(folder)
    assert_no_child(run.pid)


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_transfer_bench_that_is_stopped_leaves_no_process(folder: Path, number: signal.Signals, code: int):
    run = bench(folder, "transfer", "--tokens", "8192", "--rounds", "999")
    assert run.stderr is not None
    try:
        next(line for line in run.stderr if "round 1" in line)
    finally:
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode == code
    assert_no_child(run.pid)


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_control_prints_what_rounds_cost_and_leaves_nothing(folder: Path):
    words = "--replicas 2 --requests 3 --tp 2 --round-ms 2 --seconds 0.5 --tokens 64 --width 4 --planning-rounds 20 --json"
    run = bench(folder, "control", *words.split())
    printed, told = run.communicate(timeout=170)
    assert run.returncode == 0, told
    assert printed.count("\n") == 1
    result = json.loads(printed)
    for figure in ("control_ms", "planning_ms", "tp_growth", "planning_growth", "planning_growth_full"):
        assert result[figure] > 0
    assert "added_ms" in result
    assert [(it["requests"], it["tp"], it["round_ms"]) for it in result["rounds"]] == [(6, 1, 0.0), (6, 1, 2.0), (6, 2, 0.0)]
    for it in result["rounds"]:
        assert it["rounds"] > 0 and it["period_ms"] > it["planning_ms"] > 0 and it["scheduler_cpu_ms"] > 0
    assert result["gateway"]["tokens"] == 6 * 64 and result["gateway_tokens_per_s"] > 0
    assert [(it["replicas"], it["requests"]) for it in result["planning"]] == [(2, 6), (64, 64), (64, 192)]
    assert_nothing_left(folder)
    assert_no_child(run.pid)


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_serve_tells_each_level_and_leaves_nothing(folder: Path):
    words = ["--concurrency", "1,3", "--requests", "4", "--input-tokens", "40", "--output-tokens", "6", "--json"]
    run = bench(folder, "serve", *words)
    printed, told = run.communicate(timeout=110)
    assert run.returncode == 0, told
    served = json.loads(printed)
    assert [(level["concurrency"], level["requests"]) for level in served["levels"]] == [(1, 4), (3, 4)]
    for level in served["levels"]:
        assert level["output_tokens_per_s"] == pytest.approx(4 * 6 / level["seconds"], rel=1e-2)
        assert level["input_tokens_per_s"] == pytest.approx(4 * 40 / level["seconds"], rel=1e-2)
        assert 0 < level["time_to_first_token"]["p50"] <= level["time_to_first_token"]["p99"]
        assert level["time_per_token"]["mean"] > 0 and level["acceptance_length"] == 1
    assert len(served["memory_peak_bytes"]) == 6 and min(served["memory_peak_bytes"].values()) > 0
    assert_nothing_left(folder)
