"""Test meshes of real processes: the one place that starts, waits for, logs and reaps them, by the code of `k3mesh up`."""

import contextlib
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3mesh.client import Client, Inspection
from services.launch import up
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.state import StateDir

LOG_TAIL = 40  # lines of each log that a failing test shows


@dataclass(frozen=True)
class Mesh:
    """A mesh that is ready."""

    url: str
    state: StateDir
    addresses: dict[str, Any]  # ports.json

    @property
    def redis_url(self) -> str:
        return self.addresses["redis"]

    @property
    def prefill_address(self) -> str:
        return self.addresses["prefill-0"]["scheduler"]

    @property
    def decode_address(self) -> str:
        return self.addresses["decode-0"]["scheduler"]

    def processes(self) -> dict[str, int]:
        """Process ids now, by names such as redis, gateway, prefill-0.scheduler, decode-0.worker-1, prefill-0.agent-3."""
        return self.state.processes()

    def strays(self) -> set[int]:
        """Children of this mesh's supervisor, of whatever generation, that it does not know any more."""
        mark = f"K3MESH_PARENT={self.state.holder()}".encode()
        found: set[int] = set()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if mark in environment.read_bytes().split(b"\0"):
                    found.add(int(environment.parent.name))
        return found - set(self.processes().values())

    def signal(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes()[name], number)

    def log(self, name: str) -> str:
        return self.state.log_of(name).read_text(errors="replace")

    async def inspect(self) -> dict[str, Inspection]:
        """Counters and totals of every scheduler, worker and agent, by process name."""
        found: dict[str, Inspection] = {}
        async with Client(self.prefill_address) as client:
            for engine, role in (("prefill-0", "prefill-scheduler"), ("decode-0", "decode-scheduler")):
                where = self.addresses[engine]
                found[f"{engine}.scheduler"] = await client.inspect(role, where["scheduler"])
                for kind in ("worker", "agent"):
                    for rank, address in enumerate(where[f"{kind}s"]):
                        found[f"{engine}.{kind}-{rank}"] = await client.inspect(kind, address)
        return found


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A new directory whose path is short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="k3t-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_mesh(model: Path, *flags: str) -> Iterator[Mesh]:
    """A mesh on a free port, with more flags of `k3mesh up`; afterwards every process of it is gone, or the test fails.

    Logs are printed when the block or the start fails. A test that is killed takes the mesh with it.
    """
    with short_folder() as folder:
        words = ["--model", str(model), "--state-dir", str(folder), "--port", str(free_ports(1)[0]), *flags]
        state = StateDir(folder)
        seen: dict[str, int] = {}
        try:
            with up.attached(UpArguments.parse(words)) as url:
                seen = {name: os.pidfd_open(pid) for name, pid in state.processes().items()}
                yield Mesh(url, state, state.addresses())
        except BaseException:
            print(tails(state))
            raise
        finally:
            left = [name for name, descriptor in seen.items() if not select.select([descriptor], [], [], 0)[0]]
            for descriptor in seen.values():
                os.close(descriptor)
        assert not left and not state.processes(), f"still running after the stop: {left or state.processes()}"


def tails(state: StateDir) -> str:
    """The end of every log."""
    parts: list[str] = []
    for path in sorted(state.logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        parts.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(parts)
