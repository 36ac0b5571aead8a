"""`k3mesh demo`: a mesh on the demo model, one streamed answer, that request's timeline; nothing is left running."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from pydantic import Field

from k3mesh.cli import chat, inspect
from k3mesh.errors import MeshError
from services.contracts.flags import FlagSet
from services.launch import make_checkpoint, up
from services.launch.child import ROOT
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.scratch import scratch
from services.launch.state import StateDir

LEDGER_TIMEOUT_S = 10.0
PROMPT = "What does textwrap.dedent do?"


class DemoArguments(FlagSet):
    """k3mesh demo."""

    prompt: str = Field(default=PROMPT, description="what to ask")
    max_tokens: int = Field(default=160, ge=1, description="length of the answer")
    topology: str = Field(default="laptop", description="as of `k3mesh up`")
    model: str = Field(default=str(ROOT / "models" / "demo"), description="checkpoint; a random one is made if it is not there")


def main(argv: list[str]) -> int:
    """Return 0 when all of it worked. Logs stay behind only after a failure."""
    arguments = DemoArguments.parse(argv, "k3mesh demo")
    with scratch("demo") as folder:
        if not Path(arguments.model, "config.json").exists():
            print(f"making a tiny random K3 checkpoint in {arguments.model}")
            make_checkpoint.main([arguments.model])
        _show(arguments, str(folder))
    print("\nstopped; `make up` starts a mesh that stays")
    return 0


def _show(arguments: DemoArguments, folder: str) -> None:
    """Start, ask, tell, stop."""
    with _mesh(arguments, folder) as url:
        request_id = f"demo-{secrets.token_hex(4)}"
        print(f"\n> {arguments.prompt}")
        options = {"max_tokens": arguments.max_tokens, "temperature": 0}
        for text in chat.stream(url, [{"role": "user", "content": arguments.prompt}], options, request_id):
            print(text, end="", flush=True)
        print("\n")
        redis_url = inspect.redis_url_of(folder)
        _await_end(request_id, redis_url)
        print("\n".join(inspect.render(request_id, *inspect.read(request_id, redis_url))))


@contextlib.contextmanager
def _mesh(arguments: DemoArguments, folder: str) -> Iterator[str]:
    """A mesh on a free port for as long as the block lasts. Its supervisor dies with this process, whatever happens."""
    flags = ["--topology", arguments.topology, "--model", arguments.model, "--state-dir", folder]
    flags += ["--prefill", "--chunked-prefill-size 128"]
    began = time.monotonic()
    print("starting the mesh: Redis, prefill and decode engines, gateway")
    with up.attached(UpArguments.parse([*flags, "--port", str(free_ports(1)[0])])) as url:
        print(f"ready at {url} after {time.monotonic() - began:.1f} s")
        yield url
        print("\nstopping", flush=True)
    if StateDir(folder).holder() is not None:
        raise MeshError(f"the mesh of {folder} did not stop; see its logs")


def _await_end(request_id: str, redis_url: str) -> None:
    """The journal is written behind the stream: wait until it has the end."""
    client: Any = redis.Redis.from_url(redis_url, decode_responses=True)
    deadline = time.monotonic() + LEDGER_TIMEOUT_S
    last = "0"
    with client:
        while client.hget(f"k3:req:{request_id}", "ended") != "1":
            left = deadline - time.monotonic()
            if left <= 0:
                raise MeshError(f"request {request_id} has no end in Redis after {LEDGER_TIMEOUT_S:g} s")
            for _, entries in client.xread({f"k3:req:{request_id}:log": last}, block=max(1, int(left * 1000))):
                last = entries[-1][0]
