"""`k3mesh bench NAME`: measurements on meshes that they start themselves, one module each."""

from k3mesh.cli.commands import Command, call

BENCHES: dict[str, Command] = {}


def main(argv: list[str]) -> int:
    """Run one of them -> its exit code."""
    return call("k3mesh bench", BENCHES, argv)
