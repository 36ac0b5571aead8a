"""Write k3mesh/v1 from proto/ (`make proto`), or with --check say whether it is current (exit 1 if not)."""

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
TARGET = ROOT / "k3mesh" / "v1"


def generate(into: Path) -> None:
    """Compile every proto/k3mesh/v1/*.proto into `into`/k3mesh/v1 (messages, stubs and type stubs)."""
    protos = sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    flags = [f"-I{SOURCES}", f"-I{include}", f"--python_out={into}", f"--pyi_out={into}", f"--grpc_python_out={into}"]
    if protoc.main(["protoc", *flags, *protos]) != 0:
        sys.exit("gen_proto: protoc failed; the messages above name the file and line")
    (into / "k3mesh" / "v1" / "__init__.py").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed code instead of writing it")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = Path(scratch) / "k3mesh" / "v1"
        names = sorted(p.name for p in made.iterdir() if p.is_file())
        if check:
            present = sorted(p.name for p in TARGET.iterdir() if p.is_file())
            _, different, missing = filecmp.cmpfiles(made, TARGET, names, shallow=False)
            if different or missing or present != names:
                sys.exit(f"gen_proto: k3mesh/v1 is stale ({', '.join([*different, *missing]) or present}); run `make proto`")
            return
        for name in names:
            (TARGET / name).write_bytes((made / name).read_bytes())


if __name__ == "__main__":
    main()
