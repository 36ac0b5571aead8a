"""`k3mesh up`: start a mesh on this machine and leave it running. As a module it is the supervisor itself."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from k3mesh.errors import ConfigError, MeshError
from services.launch.child import ROOT
from services.launch.mesh import LocalMesh, UpArguments
from services.launch.state import StateDir
from services.launch.supervisor import Supervisor
from services.runtime.process import EXIT_CONFIG, Process, run

HEALTH_TIMEOUT_S = 30.0  # from the gateway's start until it says that the mesh behind it is ready
RETRY_S = 0.1


def main(argv: list[str]) -> int:
    """Return 0 once the gateway answers ready."""
    arguments = UpArguments.parse(argv, "k3mesh up")
    if arguments.foreground:
        sys.argv[1:] = argv
        run("supervisor", supervise, UpArguments)
    start(arguments)
    state = StateDir(arguments.state_dir)
    print(f"k3mesh is ready at {state.addresses()['url']}\nstop it with: k3mesh down --state-dir {state.path}")
    return 0


def start(arguments: UpArguments, parent: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a supervisor in a session of its own; return when its mesh is ready. It dies with process `parent` if given.

    ConfigError if it refuses the arguments, MeshError with the cause if the mesh does not come up; nothing runs then.
    """
    state = StateDir(arguments.state_dir)
    state.create()
    path = state.path / f"up-{os.getpid()}.notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, state.log_of("supervisor").open("ab") as log:
        notify.bind(str(path))
        environment = {**os.environ, "NOTIFY_SOCKET": str(path), "K3MESH_PARENT": str(parent or "")}
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "services.launch.up", *arguments.argv()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            _await_ready(supervisor, notify, state)
        except BaseException:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            raise
        finally:
            path.unlink()
    return supervisor


@contextlib.contextmanager
def attached(arguments: UpArguments) -> Iterator[str]:
    """A mesh that lives as long as the block, or this process: its URL."""
    supervisor = start(arguments, parent=os.getpid())
    try:
        yield StateDir(arguments.state_dir).addresses()["url"]
    finally:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()


async def supervise(process: Process, arguments: UpArguments) -> None:
    """Run the mesh until told to stop. Everything that can be refused is refused before the first process starts."""
    state = StateDir(arguments.state_dir)
    state.create()
    state.lock()
    mesh = LocalMesh(arguments)
    supervisor = Supervisor(mesh.groups(state))

    async def started() -> None:
        await healthy(mesh.url)
        process.ready()
        print(f"k3mesh is ready at {mesh.url}", flush=True)

    try:
        await supervisor.run(process.stopping, started)
    finally:
        state.clear_run()


async def healthy(url: str) -> None:
    """Return when GET /health says 200. MeshError with its last answer if it does not."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    answer = "nothing"
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            while True:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                answer = (await reader.read()).decode(errors="replace")
                writer.close()
                if answer.split(" ", 2)[1:2] == ["200"]:
                    return
                await asyncio.sleep(RETRY_S)
    except (TimeoutError, OSError) as error:
        raise MeshError(f"the gateway at {url} is not ready: it answered {answer!r} ({error!r}); see the logs") from None


def _await_ready(supervisor: "subprocess.Popen[bytes]", notify: socket.socket, state: StateDir) -> None:
    """The supervisor bounds its own start-up, so this waits for its word or its end."""
    status = ""
    ended = os.pidfd_open(supervisor.pid)
    try:
        while True:
            readable, _, _ = select.select([notify, ended], [], [])
            if notify in readable:
                message = notify.recv(65536).decode(errors="replace")
                if message == "READY=1":
                    return
                status = message.removeprefix("STATUS=").removeprefix("error: ")
            elif ended in readable:
                code = supervisor.wait()
                cause = status or f"the supervisor ended with code {code}; its log is {state.log_of('supervisor')}"
                raise (ConfigError if code == EXIT_CONFIG else MeshError)(cause)
    finally:
        os.close(ended)


if __name__ == "__main__":
    run("supervisor", supervise, UpArguments)
