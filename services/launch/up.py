"""`k3mesh up`: start a mesh on this machine and leave it running. As a module it is the supervisor itself."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from k3mesh.errors import MeshError
from services.launch.child import ROOT
from services.launch.mesh import LocalMesh, UpArguments
from services.launch.state import StateDir
from services.launch.supervisor import Supervisor
from services.runtime.process import Process, run

HEALTH_TIMEOUT_S = 30.0  # from the gateway's start until it says that the mesh behind it is ready
RETRY_S = 0.1


def main(argv: list[str]) -> int:
    """Return 0 once the gateway answers ready; the supervisor's exit code if it gave up, with its cause on stderr."""
    arguments = UpArguments.parse(argv, "k3mesh up")
    if arguments.foreground:
        sys.argv[1:] = argv
        run("supervisor", supervise, UpArguments)
    state = StateDir(arguments.state_dir)
    state.create()
    code, cause = _start_detached(arguments.argv(), state)
    if code:
        print(
            cause or f"error: the supervisor ended with code {code}; its log is {state.log_of('supervisor')}", file=sys.stderr
        )
        return code
    print(f"k3mesh is ready at {state.addresses()['url']}\nstop it with: k3mesh down --state-dir {state.path}")
    return 0


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


def _start_detached(argv: list[str], state: StateDir) -> tuple[int, str]:
    """Start the supervisor in a session of its own; -> (0, "") once it is ready, else its exit code and last word."""
    path = Path(state.path / "up.notify")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, state.log_of("supervisor").open("ab") as log:
        notify.bind(str(path))
        environment = {**os.environ, "NOTIFY_SOCKET": str(path)}
        environment.pop("K3MESH_PARENT", None)  # it outlives us
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "services.launch.up", *argv],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            return _await_ready(supervisor, notify)
        except BaseException:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            raise
        finally:
            path.unlink()


def _await_ready(supervisor: subprocess.Popen[bytes], notify: socket.socket) -> tuple[int, str]:
    """The supervisor bounds its own start-up, so this waits for its word or its end."""
    status = ""
    ended = os.pidfd_open(supervisor.pid)
    try:
        while True:
            readable, _, _ = select.select([notify, ended], [], [])
            if notify in readable:
                message = notify.recv(65536).decode(errors="replace")
                if message == "READY=1":
                    return 0, ""
                status = message.removeprefix("STATUS=")
            elif ended in readable:
                return supervisor.wait() or 1, status
    finally:
        os.close(ended)


if __name__ == "__main__":
    run("supervisor", supervise, UpArguments)
