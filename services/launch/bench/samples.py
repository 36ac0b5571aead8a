"""What one measured transfer took."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from k3mesh.errors import MeshError


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    bytes: int
    cpu_seconds: float  # of all processes that took part

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, and of those that it has started, so far (proc(5): utime and stime of /proc/PID/stat).
    MeshError if it has ended."""
    found: dict[int, tuple[int, int]] = {}  # parent, ticks
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            found[int(entry)] = int(fields[1]), int(fields[11]) + int(fields[12])
    if pid not in found:
        raise MeshError(f"process {pid} ended while it was measured")
    family = [pid]
    for it in family:  # which grows
        family += [child for child, (parent, _) in found.items() if parent == it]
    return sum(found[it][1] for it in family) / os.sysconf("SC_CLK_TCK")
