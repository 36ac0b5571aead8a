"""A whole mesh whose two engines share a GPU, agents handing over by CUDA IPC: the demo model's tokens are those of the CPU."""

import asyncio

import pytest

from services.launch.bench.load import Prompt, drive
from services.launch.child import ROOT
from tests.lib.mesh import running_mesh

pytestmark = pytest.mark.gpu(1)
DEMO = ROOT / "models" / "demo"
SHARE = "--gpu-memory-utilization 0.1 --retraction-snapshot-ratio 0.01"
DRAFTER = f"--speculative-algorithm DSPARK --speculative-draft-model-path {DEMO / 'dspark'} --speculative-num-draft-tokens 8"
PROMPTS = [Prompt(chat="What does textwrap.dedent do?"), Prompt("The mesh is"), Prompt([5, 7, 11] * 120), Prompt("def main(")]


def answers(device: str, prefill: str, decode: str) -> list[list[int]]:
    common = f"--device {device} {SHARE if device == 'cuda' else ''}"
    flags = [
        "--prefill",
        f"{common} {prefill}".replace("--retraction-snapshot-ratio 0.01", ""),
        "--decode",
        f"{common} {decode}",
    ]
    with running_mesh(DEMO, *flags) as mesh:
        return asyncio.run(drive(mesh.url, PROMPTS, 3, max_tokens=48, temperature=0)).answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafter", ["", DRAFTER], ids=["plain", "dspark"])
def test_a_mesh_on_one_gpu_gives_the_tokens_of_the_cpu(drafter: str):
    one = "--world-size 1 --pipeline-parallel-size 1 --data-parallel-size 1 --expert-parallel-size 1"
    wanted = answers("cpu", one, one)
    assert answers("cuda", f"{one} {drafter}", f"{one} {drafter}") == wanted


@pytest.mark.timeout(300)
def test_stages_and_replicas_share_a_gpu_by_way_of_the_host():
    """Four stages and two replicas with their experts spread over both, over gloo."""
    wanted = answers("cpu", "", "")
    assert answers("cuda", "", "") == wanted
