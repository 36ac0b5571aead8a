"""The state directory of one mesh on one node: lock, logs, sockets, Redis files, the list of addresses."""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from k3mesh.errors import ConfigError

SOCKET_PATH_LIMIT = 107  # sun_path without its final zero
LONGEST_SOCKET = len("/run/prefill-0.worker-00.notify")


class StateDir:
    """Paths under one directory. Whoever holds `lock()` runs the mesh of this directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.redis = self.path / "redis"
        self._lock: int | None = None

    def create(self) -> None:
        """Make it, readable by its owner alone. ConfigError where it cannot be or its sockets could not be bound."""
        longest = SOCKET_PATH_LIMIT - LONGEST_SOCKET
        if len(os.fsencode(self.path)) > longest:
            raise ConfigError(
                f"--state-dir {self.path}: is longer than {longest} bytes, the Unix sockets in it could not be bound; "
                "give a shorter path",
                param="state_dir",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            for folder in (self.logs, self.run, self.redis):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--state-dir {self.path}: cannot be used ({error.strerror}); give a directory of your own", param="state_dir"
            ) from None

    def lock(self) -> None:
        """Hold the directory until this process ends. ConfigError if another one does."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip()
            os.close(descriptor)
            raise ConfigError(
                f"--state-dir {self.path}: a mesh runs there already (process {holder}); "
                f"stop it with `k3mesh down --state-dir {self.path}`, or give another directory",
                param="state_dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor
        self.clear_run()  # of a life that was killed

    def clear_run(self) -> None:
        """Remove all sockets. Call it with the lock held."""
        shutil.rmtree(self.run)
        self.run.mkdir()

    def holder(self) -> int | None:
        """The process that runs this directory's mesh, None if none does."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(descriptor, 32, 0).decode() or 0) or None
        finally:
            os.close(descriptor)
        return None

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def pid_file(self, name: str) -> Path:
        return self.run / f"{name}.pid"

    def processes(self) -> dict[str, int]:
        """Process ids of the children that run now, by name."""
        found: dict[str, int] = {}
        for path in sorted(self.run.glob("*.pid")):
            with suppress(FileNotFoundError):  # it has ended since we looked
                found[path.stem] = int(path.read_text() or 0)
        return found

    def write_addresses(self, addresses: dict[str, Any]) -> None:
        """ports.json, for people and for the other commands."""
        (self.path / "ports.json").write_text(json.dumps(addresses, indent=2) + "\n")

    def addresses(self) -> dict[str, Any]:
        """What write_addresses wrote. ConfigError where no mesh was started."""
        try:
            return json.loads((self.path / "ports.json").read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"--state-dir {self.path}: no mesh was started there; start one with `k3mesh up`", param="state_dir"
            ) from None
