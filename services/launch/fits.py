"""Whether a machine's memory holds what is to run on it; the launchers ask before they start anything."""

from collections.abc import Sequence
from pathlib import Path

from services.contracts import argument_rules as rules
from services.contracts.arguments import EngineArguments
from services.contracts.buffers import SERVICE_PROCESS
from services.contracts.capacity import EngineCapacity, capacity_of, check_host
from services.contracts.machine import gpu_memory

SERVICES = 4  # of a mesh on one machine: Redis, both schedulers, gateway
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_engines(engines: Sequence[EngineArguments]) -> list[EngineCapacity]:
    """All rules that need the checkpoint, for engines that share this machine: they are there, can be cut that way, and fit.
    ConfigError names what does not."""
    for engine in engines:
        rules.check_files(engine)
    found = [capacity_of(engine, _gpu_memory(engine)) for engine in engines]
    on_host = [it for it in found if it.memory is None]
    if on_host:
        check_host(on_host, on_host[0].arguments.node_rank, host_memory(), SERVICES * SERVICE_PROCESS)
    return found


def has_cuda() -> bool:
    """Whether an NVIDIA device is there, told without loading a framework."""
    return Path("/dev/nvidiactl").exists()


def _gpu_memory(engine: EngineArguments) -> int | None:
    """Bytes of its GPU that one rank may take; None: it runs on the host. Workers measure what the GPU really has."""
    if not rules.runs_on_gpu(engine, has_cuda()):
        return None
    return gpu_memory(utilization=engine.gpu_memory_utilization)


def host_memory() -> int:
    """Bytes that this machine, or the control group that this process runs in, has."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    limits = [int(lines["MemTotal"].split()[0]) * 1024]
    for path in map(Path, CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)
