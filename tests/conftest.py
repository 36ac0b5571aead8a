"""One tiny checkpoint for all tests that run a mesh, and the mesh of a module."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launch import make_checkpoint
from tests.lib.mesh import Mesh, running_mesh

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would our children


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert make_checkpoint.main([str(folder), "--preset", "tiny"]) == 0
    return folder


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[Mesh]:
    """The laptop topology with chunks of one block, so that prompts take several."""
    with running_mesh(checkpoint, "--prefill=--chunked-prefill-size 128") as mesh:
        yield mesh
