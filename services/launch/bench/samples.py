"""What one measured transfer took."""

import os
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
    """Processor time of a process since its start (proc(5): utime and stime of /proc/PID/stat). MeshError if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise MeshError(f"process {pid} ended while it was measured") from None
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
