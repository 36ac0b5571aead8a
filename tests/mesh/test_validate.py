"""`k3mesh validate` from the command line to its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.launch.child import ROOT


def validate(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "k3mesh.cli.main", "validate", "--device", "cpu", "--report", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)


@pytest.mark.timeout(120)
def test_the_dispatcher_is_compared_in_both_modes_and_what_was_not_run_is_said(tmp_path: Path):
    done = validate(tmp_path, "--step", "1,2", "--name", "here")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "here.json").read_text())
    first, second = report["steps"]
    verdicts = {it["compared"]: it["verdict"] for it in first["checks"]}
    assert verdicts["dispatch over 2 ranks, normal"] == verdicts["dispatch over 2 ranks, low_latency"] == "passed"
    assert second["verdict"] == "not run" and report["environment"]["device"] == "CPU"
    assert "--step 1,2" in (tmp_path / "here.md").read_text()


def test_a_step_that_is_none_is_refused(tmp_path: Path):
    done = validate(tmp_path, "--step", "7")
    assert done.returncode == 2 and "--step 7: there is no such step" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_all_steps_pass_on_a_cpu(tmp_path: Path):
    done = validate(tmp_path, "--concurrency", "1,3", "--output-tokens", "16")
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert [step["verdict"] for step in report["steps"]] == ["passed", "not run", *["passed"] * 4]
