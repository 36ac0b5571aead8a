"""What a checkpoint is, in 64 hex digits, without reading all of it: equal on every node that has the same files."""

import hashlib
from pathlib import Path

from k3mesh.errors import ConfigError

SAMPLE = 4096  # bytes, at the start (header) and the end (weights) of each file


def model_fingerprint(folder: str | Path) -> str:
    """sha256 over config.json and, for each safetensors file, its name, size, first and last bytes. ConfigError if unreadable.

    Two checkpoints of one shape differ in their weights, so a few of those bytes tell them apart.
    """
    digest = hashlib.sha256()
    try:
        digest.update((Path(folder) / "config.json").read_bytes())
        for path in sorted(Path(folder).glob("*.safetensors")):
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"\0{path.name}\0{size}\0".encode())
                digest.update(file.read(SAMPLE))
                file.seek(max(0, size - SAMPLE))
                digest.update(file.read(SAMPLE))
    except OSError as error:
        raise ConfigError(f"--model {folder}: {error}; give a readable checkpoint directory", param="model") from error
    return digest.hexdigest()
