"""The `k3mesh` command: a table of sub-commands, each imported when it is called."""

import importlib
import os
import sys
from dataclasses import dataclass

from k3mesh.errors import ConfigError, MeshError

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """Where `main(argv) -> exit code` of a sub-command is, and what it does."""

    module: str
    summary: str


COMMANDS = {
    "up": Command("services.launch.up", "start a mesh on this machine and leave it running"),
    "down": Command("services.launch.down", "stop it"),
    "status": Command("services.launch.status", "what runs, where, and how it is"),
    "demo": Command("services.launch.demo", "mesh on the demo model, one streamed answer, its timeline, stop"),
    "chat": Command("k3mesh.cli.chat", "talk to a mesh over HTTP"),
    "inspect": Command("k3mesh.cli.inspect", "a request's state, log and timeline"),
    "serve": Command("services.launch.serve", "run one node of one engine"),
    "check": Command("services.launch.check", "check flags offline and print the plan"),
    "make-checkpoint": Command("services.launch.make_checkpoint", "write a random K3 checkpoint"),
}


def main(argv: list[str] | None = None) -> None:
    """Run a sub-command and exit with its code: 0 done, 1 failed, 2 refused (wrong flags or files), 130 interrupted."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """-> exit code. Failures are one line, `error: what, which value, what to do`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_CONFIG
    name, *rest = argv
    command = COMMANDS.get(name)
    if command is None:
        return _failed(ConfigError(f"k3mesh {name}: no such command; `k3mesh --help` lists them"))
    try:
        code = int(importlib.import_module(command.module).main(rest) or 0)
        sys.stdout.flush()
        return code
    except MeshError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `k3mesh check | head`: nobody reads on, and Python's flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "services":
            raise
        return _failed(
            ConfigError(f"k3mesh {name}: the services are not installed here; run it from a checkout (`make setup`)")
        )


def _failed(error: MeshError) -> int:
    print(" ".join(f"error: {error.message}".split()), file=sys.stderr)
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def _help() -> str:
    lines = [f"  {name:<16} {command.summary}" for name, command in COMMANDS.items()]
    return "usage: k3mesh COMMAND [flags]\n\n" + "\n".join(lines) + "\n\n`k3mesh COMMAND --help` lists a command's flags."


if __name__ == "__main__":
    main()
