"""`k3mesh serve`: engines node by node, in the deployment guide's flags. Loopback addresses stand for the nodes."""

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from k3mesh.client import Client, SamplingParams, Tokens
from services.launch.child import ROOT
from services.launch.ports import free_ports
from services.launch.state import StateDir
from tests.lib.mesh import short_folder, tails
from tests.lib.oracle import Oracle
from tests.lib.redis_server import RedisServer

COMMON = (
    "--dtype float32 --kv-cache-dtype float32 --attention-backend reference --kda-backend reference --moe-backend reference"
    " --all2all-backend gloo --attn-tp-size 1 --dense-tp-size 1 --moe-tp-size 1 --disable-kvstore --max-model-len 2048"
)
PREFILL = (
    "--world-size 4 --nnodes 2 --nprocs-per-node 2 --disaggregation-mode prefill --pipeline-parallel-size 4"
    " --data-parallel-size 1 --expert-parallel-size 1 --deepep-mode normal --max-num-seqs 8 --chunked-prefill-size 128"
)
DECODE = (
    "--world-size 1 --nnodes 1 --nprocs-per-node 1 --disaggregation-mode decode --pipeline-parallel-size 1"
    " --data-parallel-size 1 --expert-parallel-size 1 --deepep-mode auto --max-num-seqs 8 --max-cudagraph-capture-size 8"
)


@contextlib.contextmanager
def node(folder: Path, name: str, flags: str, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """One launcher, its logs under `folder`/NAME; and the socket where it says that its node is ready."""
    state = StateDir(folder / name)
    state.create()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, state.log_of("node").open("wb") as log:
        notify.bind(str(folder / f"{name}.notify"))
        words = [*COMMON.split(), *flags.split(), *more, "--state-dir", str(state.path)]
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / f"{name}.notify"), "K3MESH_PARENT": str(os.getpid())}
        process = subprocess.Popen(
            [sys.executable, "-m", "k3mesh.cli.main", "serve", *words], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            yield process, notify
        except BaseException:
            print(tails(state))
            raise
        finally:
            process.terminate()
            process.wait(60)
        assert process.returncode == 0 and not state.processes()


def until_ready(notify: socket.socket) -> None:
    assert select.select([notify], [], [], 90)[0], "the node is not ready after 90 s"
    assert notify.recv(65536) == b"READY=1"


async def test_two_nodes_of_prefill_and_one_of_decode_answer_as_the_model_does(checkpoint: Path):
    p_base, d_base, p_meet, d_meet = free_ports(4)
    model = ("--model", str(checkpoint))
    with short_folder() as folder, contextlib.ExitStack() as stack:
        redis = RedisServer(folder)
        redis.start()
        stack.callback(redis.stop)
        shared = (*model, "--redis-url", redis.url)
        decode = ("--port-base", str(d_base), "--dist-init-addr", f"127.0.0.1:{d_meet}")
        prefill = ("--port-base", str(p_base), "--dist-init-addr", f"127.0.0.2:{p_meet}", "--node-hosts", "127.0.0.2,127.0.0.3")
        nodes = [
            stack.enter_context(node(folder, "d", DECODE, *shared, *decode)),
            stack.enter_context(node(folder, "p1", PREFILL, *shared, *prefill, "--node-rank", "1")),
            stack.enter_context(
                node(folder, "p0", PREFILL, *shared, *prefill, "--node-rank", "0", "--decode-address", f"127.0.0.1:{d_base}")
            ),
        ]
        for _, notify in nodes:
            until_ready(notify)
        prompt = [300 + n % 700 for n in range(200)]
        async with Client(f"127.0.0.2:{p_base}") as client:
            async with asyncio.timeout(30):
                while not (await client.describe()).ready:
                    await asyncio.sleep(0.1)
            stream = await client.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True), timeout=60)
            tokens = [token async for event in stream if isinstance(event, Tokens) for token in event.tokens]
        Oracle(checkpoint).assert_greedy(prompt, tokens, tie=0.0)
        assert len(tokens) == 6
