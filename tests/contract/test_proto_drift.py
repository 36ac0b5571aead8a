"""The committed code of k3mesh/v1 is what proto/ says."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "gen_proto.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_generated_code_is_current():
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_a_changed_contract_is_noticed(tmp_path: Path):
    for part in ("proto", "scripts", "k3mesh/v1"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    assert check(tmp_path).returncode == 0
    contract = tmp_path / "proto" / "k3mesh" / "v1" / "common.proto"
    contract.write_text(contract.read_text() + "\nmessage Sneaked { uint32 in = 1; }\n")
    result = check(tmp_path)
    assert result.returncode == 1 and "common_pb2.py" in result.stderr and "make proto" in result.stderr
