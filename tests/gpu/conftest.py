"""Tests that need CUDA devices; each says how many by `pytest.mark.gpu(count)`."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture is made: some start a mesh."""
    marker = item.get_closest_marker("gpu")
    assert marker is not None, "mark it gpu"
    wanted, found = marker.args[0], torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, {found} are visible")
