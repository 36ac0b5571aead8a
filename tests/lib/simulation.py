"""Simulated meshes for tests: small engines, and a cost model whose figures the test chooses."""

import json
from pathlib import Path
from typing import Any

from services.simulate.constants import Constants, load

NAMES = (
    "client_s", "schedulers_s", "agents_s", "step_s", "round_s", "transfer_s", "nic_bytes_per_s", "host_copy_bytes_per_s",
    "stage_step_s", "stage_token_s", "stage_pair_s", "stage_last_s", "hop_s", "hop_token_s", "replica_round_s",
    "replica_row_s", "replica_context_s",
)  # fmt: skip
ALONE = [[1, 1], [64, 64]]  # none is slower for the others


def constants_file(folder: Path, **values: Any) -> Path:
    """A file for the measured model in which all takes no time, except what is named; stages are alike."""
    given: dict[str, Any] = {
        **dict.fromkeys(NAMES, 0.0),
        "nic_bytes_per_s": 1e12,
        "host_copy_bytes_per_s": 1e12,
        "acceptance": [],
        "stages_speed": ALONE,
        "stages_beside_speed": ALONE,
        "round_beside_speed": [[1, 1]],
    }
    given |= values
    for name in ("stage_step_s", "stage_token_s"):
        given[name] = [given[name]]
    entries = {name: {"value": value, "unit": "", "source": "a test"} for name, value in given.items()}
    path = folder / "constants.json"
    path.write_text(json.dumps({"name": "test", "model": "measured", "constants": entries}))
    return path


def constants(folder: Path, **values: Any) -> Constants:
    return load(constants_file(folder, **values))
