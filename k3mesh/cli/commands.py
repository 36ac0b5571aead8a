"""A table of commands by name, each imported when it is called: the `k3mesh` command itself, and groups in it."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from k3mesh.errors import ConfigError

EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Command:
    """Where `main(argv) -> exit code` of a command is, and what it does."""

    module: str
    summary: str


def call(program: str, commands: Mapping[str, Command], argv: list[str]) -> int:
    """Run the command that the first word names with the words behind it -> its exit code. ConfigError if there is none;
    without words the list of commands on standard error, and code 2."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(program, commands), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_CONFIG
    name, *rest = argv
    command = commands.get(name)
    if command is None:
        raise ConfigError(f"{program} {name}: no such command; `{program} --help` lists them")
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "services":
            raise
        raise ConfigError(
            f"{program} {name}: the services are not installed here; run it from a checkout (`make setup`)"
        ) from None
    return int(module.main(rest) or 0)


def _help(program: str, commands: Mapping[str, Command]) -> str:
    lines = [f"  {name:<16} {command.summary}" for name, command in commands.items()]
    return (
        f"usage: {program} COMMAND [flags]\n\n" + "\n".join(lines) + f"\n\n`{program} COMMAND --help` lists a command's flags."
    )
