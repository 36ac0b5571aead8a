"""A whole mesh whose two engines share a GPU, agents handing over by CUDA IPC: the demo model's tokens are those of the CPU."""

import asyncio

import pytest

from services.launch.bench.load import Prompt, drive
from services.launch.child import ROOT
from tests.lib.mesh import running_mesh

pytestmark = pytest.mark.gpu(1)
DEMO = ROOT / "models" / "demo"
SHARE = "--dtype float32 --gpu-memory-utilization 0.1"
DRAFTER = f"--speculative-algorithm DSPARK --speculative-draft-model-path {DEMO / 'dspark'} --speculative-num-draft-tokens 8"
PROMPTS = [Prompt(chat="What does textwrap.dedent do?"), Prompt("The mesh is"), Prompt([5, 7, 11] * 120), Prompt("def main(")]


def answers(topology: str, prefill: str, decode: str) -> list[list[int]]:
    flags = ["--topology", topology, f"--prefill={prefill}", f"--decode={decode}"]
    with running_mesh(DEMO, *flags) as mesh:
        return asyncio.run(drive(mesh.url, PROMPTS, 3, max_tokens=48, temperature=0)).answers


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return answers("laptop", "", "")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafter", ["", DRAFTER], ids=["plain", "dspark"])
def test_a_mesh_on_one_gpu_gives_the_tokens_of_the_cpu(wanted: list[list[int]], drafter: str):
    assert answers("one-gpu", f"{SHARE} {drafter}", f"{SHARE} {drafter}") == wanted


@pytest.mark.timeout(300)
def test_stages_and_replicas_share_a_gpu_by_way_of_the_host(wanted: list[list[int]]):
    """Four stages, and two replicas that have the experts between them: over gloo."""
    share = "--device cuda --gpu-memory-utilization 0.06"
    assert answers("laptop", share, f"{share} --retraction-snapshot-ratio 0.1") == wanted
