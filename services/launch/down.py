"""`k3mesh down`: stop the mesh of a state directory, gracefully, and leave nothing running."""

import os
import select
import signal

from pydantic import Field

from k3mesh.errors import MeshError
from services.contracts.flags import FlagSet
from services.launch.state import StateDir

KILL_WAIT_S = 10.0


class DownArguments(FlagSet):
    """k3mesh down."""

    state_dir: str = Field(default=".state", description="directory that `k3mesh up` was given")
    timeout: float = Field(default=120.0, gt=0, description="seconds for a graceful stop; then everything is killed")


def main(argv: list[str]) -> int:
    """Return 0 when nothing runs (any more)."""
    arguments = DownArguments.parse(argv, "k3mesh down")
    state = StateDir(arguments.state_dir)
    supervisor = state.holder()
    if supervisor is None:
        print(f"no mesh runs in {state.path}")
        return 0
    stop(supervisor, arguments.timeout)
    print(f"the mesh of {state.path} has stopped")
    return 0


def stop(supervisor: int, timeout: float) -> None:
    """Ask the supervisor to end and wait; after `timeout` kill it, which kills its children with it."""
    try:
        descriptor = os.pidfd_open(supervisor)
    except ProcessLookupError:
        return
    try:
        for number, patience in ((signal.SIGTERM, timeout), (signal.SIGKILL, KILL_WAIT_S)):
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return
            if select.select([descriptor], [], [], patience)[0]:
                return
        raise MeshError(f"the supervisor (process {supervisor}) does not end; it may hang in the kernel")
    finally:
        os.close(descriptor)
