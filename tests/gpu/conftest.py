"""Tests that need CUDA devices; each says how many by `pytest.mark.gpu(count)`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def enough_gpus(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("gpu")
    assert marker is not None, "mark it gpu"
    wanted, found = marker.args[0], torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, {found} are visible")
