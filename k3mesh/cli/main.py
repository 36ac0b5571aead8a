"""The `k3mesh` command: a table of sub-commands, each imported when it is called."""

import os
import sys

from k3mesh.cli.commands import EXIT_CONFIG, Command, call
from k3mesh.errors import ConfigError, MeshError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

COMMANDS = {
    "up": Command("services.launch.up", "start a mesh on this machine and leave it running"),
    "down": Command("services.launch.down", "stop it"),
    "status": Command("services.launch.status", "what runs, where, and how it is"),
    "demo": Command("services.launch.demo", "mesh on the demo model, one streamed answer, its timeline, stop"),
    "chat": Command("k3mesh.cli.chat", "talk to a mesh over HTTP"),
    "inspect": Command("k3mesh.cli.inspect", "a request's state, log and timeline"),
    "serve": Command("services.launch.serve", "run one node of one engine"),
    "check": Command("services.launch.check", "check flags offline and print the plan"),
    "plan": Command("services.launch.plan", "each rank's memory, part by part, and what fits"),
    "sim": Command("services.simulate.main", "a mesh in virtual time: latency, throughput and utilisation of 64 GPUs and more"),
    "validate": Command("services.launch.validate.main", "the deployment guide's validation steps, with a report"),
    "make-checkpoint": Command("services.launch.make_checkpoint", "write a random K3 checkpoint"),
    "bench": Command("services.launch.bench.main", "measure; `k3mesh bench --help` lists what"),
}


def main(argv: list[str] | None = None) -> None:
    """Run a sub-command and exit with its code: 0 done, 1 failed, 2 refused (wrong flags or files), 130 interrupted."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """-> exit code. Failures are one line, `error: what, which value, what to do`."""
    try:
        code = call("k3mesh", COMMANDS, argv)
        sys.stdout.flush()
        return code
    except MeshError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `k3mesh check | head`: nobody reads on, and Python's flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _failed(error: MeshError) -> int:
    print(" ".join(f"error: {error.message}".split()), file=sys.stderr)
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


if __name__ == "__main__":
    main()
