"""The `k3mesh` command: codes, messages, and what its commands print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3mesh.cli import inspect
from k3mesh.cli.main import COMMANDS, run
from services.contracts.lifecycle import RANK, State
from services.launch import make_checkpoint
from services.launch.bench.main import BENCHES
from services.launch.state import StateDir
from services.runtime.ledger import Ledger
from tests.lib.mesh import short_folder
from tests.lib.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert make_checkpoint.main([str(folder)]) == 0
    return folder


@pytest.fixture
def folder():
    with short_folder() as folder:
        yield folder


def k3mesh(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k3mesh.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_starts_quickly_without_loading_them():
    result = k3mesh("--help")
    assert result.returncode == 0 and all(f"  {name} " in result.stdout for name in COMMANDS)
    loaded = f"{sys.executable} -X importtime -m k3mesh.cli.main --help"
    modules = subprocess.run(loaded.split(), cwd=ROOT, capture_output=True, text=True, timeout=60).stderr
    assert "services" not in modules and "torch" not in modules and "grpc" not in modules


@pytest.mark.parametrize("name", [*COMMANDS, *(f"bench {name}" for name in BENCHES)])
def test_every_command_has_help_and_refuses_an_unknown_flag_in_one_line(name: str):
    helped, refused = k3mesh(*name.split(), "--help"), k3mesh(*name.split(), "--no-such-flag")
    assert helped.returncode == 0 and "usage:" in helped.stdout
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1


def test_no_command_and_an_unknown_one_are_refused():
    assert k3mesh().returncode == 2
    result = k3mesh("upp")
    assert (result.returncode, result.stderr) == (2, "error: k3mesh upp: no such command; `k3mesh --help` lists them\n")
    result = k3mesh("bench", "sped")
    assert (result.returncode, result.stderr) == (
        2, "error: k3mesh bench sped: no such command; `k3mesh bench --help` lists them\n",
    )  # fmt: skip


def test_check_prints_the_plan_of_both_engines(checkpoint: Path):
    result = k3mesh("check", "--model", str(checkpoint))
    assert result.returncode == 0, result.stderr
    assert "prefill-0: prefill, 4 ranks on 1 node(s): PP4 DP1 TP1 EP1, float32" in result.stdout
    assert "stage 3: rank 3 on node 0, layers 10-12" in result.stdout
    assert "decode-0: decode, 2 ranks on 1 node(s): PP1 DP2 TP1 EP2, float32" in result.stdout
    assert result.stdout.count("on this machine: can start") == 2


def test_check_tells_a_deployment_that_only_this_machine_cannot_run(checkpoint: Path):
    result = k3mesh("check", "--model", str(checkpoint), "--disaggregation-mode", "decode", "--attention-backend", "flashmla")
    assert result.returncode == 0 and "on this machine: refused: --attention-backend flashmla" in result.stdout


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--model", "{folder}/none"], "--model {folder}/none: no such directory; give a checkpoint directory"),
        (
            ["--prefill=--attention-backend flashmla --dtype bfloat16 --kv-cache-dtype bfloat16"],
            "--dtype bfloat16: must be the",
        ),
        (["--decode=--retraction-snapshot-ratio 0.0001 --num-blocks 9"], "--retraction-snapshot-ratio 0.0001: that share of a"),
        (["--prefill=--kda-backend flashkda"], "--kda-backend flashkda: needs an NVIDIA GPU"),
        (["--gateway=--max-body-bytes 0"], "--max-body-bytes 0: must be at least 1"),
        (["--prefill=--max-num-seqs 0"], "--max-num-seqs 0: must be at least 1"),
    ],
)
def test_up_refuses_before_any_process_starts(words: list[str], cause: str, checkpoint: Path, folder: Path):
    words = [word.format(folder=folder) for word in words]
    model = [] if "--model" in words else ["--model", str(checkpoint)]
    result = k3mesh("up", *model, *words, "--state-dir", str(folder / "s"))
    assert result.returncode == 2 and result.stderr.startswith(f"error: {cause.format(folder=folder)}")
    assert [path.name for path in (folder / "s" / "logs").iterdir()] == ["supervisor.log"]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--algorithm", "eagle"], "--algorithm eagle: no such choice; give one of dspark, nextn"),
        (["--width", "1"], "--width 1: must be at least 2"),
        (["--prompts", "/nowhere"], "--prompts /nowhere: cannot be read "),
        (["--draft-model", "/nowhere"], "--speculative-draft-model-path /nowhere: no such directory"),
        (["--algorithm", "nextn"], "{model}/config.json: num_nextn_predict_layers = 0: "),
        (["--model", "/nowhere", "--adversarial"], "--model /nowhere: no such directory"),
        (["--decode=--max-num-seqs 0"], "--max-num-seqs 0: must be at least 1"),
    ],
)
def test_bench_speculation_refuses_before_any_process_starts(words: list[str], cause: str, checkpoint: Path, folder: Path):
    model = [] if "--model" in words else ["--model", str(checkpoint)]
    result = k3mesh("bench", "speculation", *model, *words, TMPDIR=str(folder))
    assert result.returncode == 2 and result.stderr.startswith(f"error: {cause.format(model=checkpoint)}"), result.stderr
    assert result.stdout == "" and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--tokens", "8192,0"], "--tokens 8192,0: must be prompt lengths of at least 1; "),
        (["--tokens", "99999999"], "--tokens 99999999: the pools of both ranks take 6681.7 GB, "),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--at-once", "8,0"], "--at-once 8,0: must be at least 1; "),
        (["--device", "cuda"], "--device cuda: two GPUs are needed, 0 are visible; "),
    ],
)
def test_bench_transfer_refuses_before_any_process_starts(words: list[str], cause: str, folder: Path):
    result = k3mesh("bench", "transfer", *words, TMPDIR=str(folder), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2 and result.stderr.startswith(f"error: {cause}"), result.stderr
    assert result.stdout == "" and not list(folder.iterdir())


def test_up_without_a_redis_server_says_what_to_install(checkpoint: Path, folder: Path):
    result = k3mesh("up", "--model", str(checkpoint), "--state-dir", str(folder), PATH="/nowhere")
    assert result.returncode == 2 and result.stderr.startswith("error: redis-server: is not installed; ")


def test_down_and_status_of_a_directory_without_a_mesh(folder: Path):
    down, status = k3mesh("down", "--state-dir", str(folder)), k3mesh("status", "--state-dir", str(folder))
    assert (down.returncode, down.stdout) == (0, f"no mesh runs in {folder}\n")
    assert (status.returncode, status.stdout) == (3, f"no mesh runs in {folder}\n")


def test_serve_refuses_what_a_node_must_know(checkpoint: Path, folder: Path):
    engine = ["serve", "--model", str(checkpoint), "--state-dir", str(folder), "--disaggregation-mode", "prefill"]
    result = k3mesh(*engine)
    assert result.returncode == 2 and "--decode-address : node 0 of a prefill engine needs it; " in result.stderr
    nodes = [*engine, "--decode-address", "h:1", "--nnodes", "2", "--world-size", "2", "--pipeline-parallel-size", "2"]
    assert "--node-hosts 127.0.0.1: names 1 of --nnodes 2 nodes; " in k3mesh(*nodes).stderr
    result = k3mesh(*nodes, "--node-hosts", "a,b")
    assert result.returncode == 2 and "--dist-init-addr 127.0.0.1:29500: is not reachable from other nodes; " in result.stderr


async def test_inspect_prints_state_log_and_timeline(folder: Path, capsys: pytest.CaptureFixture[str]):
    redis = RedisServer(folder)
    redis.start()
    try:
        ledger = Ledger(redis.url, "prefill-0")
        await ledger.connect()
        ledger.transition("r1", State.QUEUED, 0, RANK[State.QUEUED], prompt_tokens=200, attempt=0)
        ledger.transition(
            "r1", State.BOOTSTRAPPING, 0, RANK[State.BOOTSTRAPPING], queued_seconds=0.002, room=77, prefix_tokens=0
        )
        started = {"ready_seconds": 0.003, "held_seconds": 0.001, "cached_tokens": 128}
        ledger.transition("r1", State.PREFILLING, 0, RANK[State.PREFILLING], **started)
        chunks = "[[0,0,128,1000.0,1000.01],[1,0,128,1000.01,1000.03]]"
        ledger.transition("r1", State.TRANSFERRING, 0, RANK[State.TRANSFERRING], chunks=chunks)
        await ledger.close()
        decode = Ledger(redis.url, "decode-0")
        await decode.connect()
        decode.transition("r1", State.INSTALLED, 0, 6, bytes=2_000_000, transfer_seconds=0.004, gb_s=0.5)
        figures = {"rounds": 9, "completion_tokens": 10, "seconds": 0.09, "tokens_per_s": 100.0}
        decode.transition("r1", State.FINISHED, 0, 9, reason="length", **figures)
        await decode.close()
        StateDir(folder).write_addresses({"redis": redis.url})
        assert run(["inspect", "chatcmpl-r1", "--state-dir", str(folder)]) == 0
        printed = capsys.readouterr().out
        assert run(["inspect", "r2", "--redis-url", redis.url]) == 1
        assert capsys.readouterr().err.startswith("error: request r2: Redis has no record of it; ")
    finally:
        redis.stop()
    lines = printed.splitlines()
    assert lines[0] == "r1: FINISHED (length)" and "room 77, last written by decode-0" in lines[1]
    assert [line.split()[1] for line in lines[4:10]] == [
        "QUEUED", "BOOTSTRAPPING", "PREFILLING", "TRANSFERRING", "INSTALLED", "FINISHED",
    ]  # fmt: skip
    for part in (
        "queued     2.0 ms", "reserved   3.0 ms", "prefill    stage 1, tokens 0-127", "for 20.0 ms",
        "cached     128 prompt tokens were not computed, rows of 0 were at D already",
        "transfer   2,000,000 bytes in 4.0 ms, 0.500 GB/s", "decode     9 rounds in 90.0 ms, 10 tokens, 100.0 tokens/s",
    ):  # fmt: skip
        assert part in printed
    assert run(["inspect", "r1", "--redis-url", redis.url]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_inspect_needs_a_mesh_or_an_address(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["inspect", "r1", "--state-dir", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"error: --state-dir {folder}: no mesh was started there; give its directory, or --redis-url\n"
    )
    assert inspect.COMMON.isdisjoint(inspect.ELSEWHERE)
