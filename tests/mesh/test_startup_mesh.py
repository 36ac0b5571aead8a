"""A whole mesh comes up, heals, and goes down; and says in one line why it does not come up."""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from services.launch.child import ROOT
from services.launch.ports import free_ports
from services.launch.state import StateDir
from services.launch.up import healthy
from tests.lib.load import assert_nothing_left, complete
from tests.lib.mesh import Mesh, running_mesh, short_folder


def k3mesh(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k3mesh.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder
        k3mesh("down", "--state-dir", str(folder / "state"), "--timeout", "5")


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint) as mesh:
        yield mesh


async def restarted(mesh: Mesh, name: str, process: int) -> None:
    """Wait until `name` runs with another process id and the mesh is ready again."""
    async with asyncio.timeout(60):
        while mesh.processes().get(name) in (None, process):
            await asyncio.sleep(0.05)
        while True:
            try:
                await healthy(mesh.url)
                return
            except Exception:  # nobody listens yet
                await asyncio.sleep(0.1)


async def answers(mesh: Mesh) -> list[int]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        return (await complete(client, [300, 301, 302], max_tokens=4, ignore_eos=True)).tokens


@pytest.mark.parametrize(
    "lost",
    ["redis", "decode-0.worker-1", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gateway", "prefill-0.agent-2"))],
)
async def test_a_lost_process_comes_back_and_the_mesh_answers_as_before(mesh: Mesh, lost: str):
    before, expected = mesh.processes(), await answers(mesh)
    mesh.signal(lost)
    await restarted(mesh, lost, before[lost])
    assert await answers(mesh) == expected
    await assert_nothing_left(mesh)
    fate = lost.partition(".")[0]
    after = mesh.processes()
    assert {name for name in before if after[name] != before[name]} == {name for name in before if name.startswith(fate)}


def test_up_answers_and_down_leaves_nothing(checkpoint: Path, folder: Path):
    state, port = folder / "state", free_ports(1)[0]
    up = ["up", "--model", str(checkpoint), "--state-dir", str(state), "--port", str(port)]
    first = k3mesh(*up)
    assert first.returncode == 0, first.stderr
    assert f"k3mesh is ready at http://127.0.0.1:{port}" in first.stdout
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    status = k3mesh("status", "--state-dir", str(state))
    assert status.returncode == 0 and "prefill-0" in status.stdout and "decode-0" in status.stdout

    again = k3mesh(*up)
    assert again.returncode == 2 and f"--state-dir {state}: a mesh runs there already" in again.stderr
    taken = k3mesh(*up[:-4], "--state-dir", str(folder / "other"), "--port", str(port))
    assert taken.returncode == 2 and f"--port {port}: 127.0.0.1:{port} is in use" in taken.stderr

    processes = StateDir(state).processes()
    assert len(processes) == 2 + 2 + 2 * (4 + 2)  # redis, gateway, two schedulers, a worker and an agent for each rank
    descriptors = [os.pidfd_open(pid) for pid in processes.values()]
    assert k3mesh("down", "--state-dir", str(state)).returncode == 0
    assert all(select.select([descriptor], [], [], 0)[0] for descriptor in descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    down = k3mesh("down", "--state-dir", str(state))
    assert (down.returncode, down.stdout) == (0, f"no mesh runs in {state}\n")


def test_a_checkpoint_without_one_tensor_is_told_by_rank_and_name(checkpoint: Path, folder: Path):
    broken = folder / "broken"
    shutil.copytree(checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if ".layers.12." in name and name.endswith("o_proj.weight"))
    del tensors[name]
    save_file(tensors, broken / "model.safetensors")
    result = k3mesh("up", "--model", str(broken), "--state-dir", str(folder / "state"), "--port", str(free_ports(1)[0]))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and name in result.stderr and ".worker-" in result.stderr
    assert StateDir(folder / "state").processes() == {} and StateDir(folder / "state").holder() is None


def test_an_absent_redis_is_told_by_flag_and_value(checkpoint: Path, folder: Path):
    url = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    where = ["--state-dir", str(folder / "state"), "--port", str(free_ports(1)[0])]
    result = k3mesh("up", "--model", str(checkpoint), *where, "--redis-url", url)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and f"--redis-url {url}: Redis does not answer" in result.stderr


def test_an_interrupted_up_leaves_nothing(checkpoint: Path, folder: Path):
    state = StateDir(folder / "state")
    words = ["up", "--model", str(checkpoint), "--state-dir", str(state.path), "--port", str(free_ports(1)[0])]
    process = subprocess.Popen([sys.executable, "-m", "k3mesh.cli.main", *words], cwd=ROOT, stderr=subprocess.PIPE)
    while not state.run.exists() or not state.processes():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and state.holder() is None and state.processes() == {}


def test_ports_json_names_every_address(mesh: Mesh):
    written = json.loads((mesh.state.path / "ports.json").read_text())
    assert written["url"] == mesh.url and written["redis"].startswith("unix://")
    assert len(written["prefill-0"]["workers"]) == len(written["prefill-0"]["agents"]) == 4
    assert len(written["decode-0"]["workers"]) == 2 and written["decode-0"]["scheduler"] == mesh.decode_address
