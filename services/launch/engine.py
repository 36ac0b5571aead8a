"""One engine's processes on one node: who listens where, and the commands."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.contracts.arguments import EngineArguments
from services.launch.child import Spec
from services.launch.state import StateDir

GATEWAY, SCHEDULER, WORKER, AGENT, REDIS = range(5)  # stop orders: those who would miss the other stop first
SCHEDULER_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """HOST:PORT of every process of one engine, over all its nodes."""

    scheduler: str
    workers: tuple[str, ...]  # by global rank
    agents: tuple[str, ...]
    links: tuple[str, ...]  # where decode agents link to those of a prefill engine


def lay_out(hosts: Sequence[str], nprocs: int, ports: Sequence[int]) -> Addresses:
    """Addresses of an engine whose nodes all use the same ports: the scheduler's (on the first node), then a worker's, an
    agent's and its links' for each local rank. len(ports) = ports_needed(nprocs)."""
    scheduler, *others = ports
    return Addresses(
        scheduler=f"{hosts[0]}:{scheduler}",
        workers=tuple(f"{host}:{port}" for host in hosts for port in others[:nprocs]),
        agents=tuple(f"{host}:{port}" for host in hosts for port in others[nprocs : 2 * nprocs]),
        links=tuple(f"{host}:{port}" for host in hosts for port in others[2 * nprocs :]),
    )


def ports_needed(nprocs: int) -> int:
    return 1 + 3 * nprocs


def engine_specs(arguments: EngineArguments, addresses: Addresses, state: StateDir, decode_address: str | None) -> list[Spec]:
    """This node's agents and workers, and on node 0 the scheduler."""
    name = arguments.engine_id
    run_dir = state.run / name
    run_dir.mkdir(exist_ok=True)
    common = arguments.argv(EngineArguments)
    first = arguments.node_rank * arguments.nprocs_per_node
    specs: list[Spec] = []
    for rank in range(first, first + arguments.nprocs_per_node):
        own = ["--rank", str(rank), "--agent-socket", str(run_dir / f"agent-{rank}.sock")]
        agent = [*common, *own, "--listen", addresses.agents[rank], "--peer-listen", addresses.links[rank]]
        worker = [*common, *own, "--listen", addresses.workers[rank], "--run-dir", str(run_dir)]
        specs.append(python_spec(f"{name}.agent-{rank}", "services.kvtransfer.main", agent, AGENT))
        specs.append(python_spec(f"{name}.worker-{rank}", "services.worker.main", worker, WORKER))
    if arguments.node_rank == 0:
        role = arguments.disaggregation_mode
        leaders = addresses.workers[:: arguments.attn_tp_size]
        flags = [
            *common,
            "--listen",
            addresses.scheduler,
            "--workers",
            ",".join(leaders),
            "--agents",
            ",".join(addresses.agents),
        ]
        if decode_address is not None:
            flags += ["--decode-address", decode_address]
        scheduler = python_spec(f"{name}.scheduler", f"services.scheduler.{role}.main", flags, SCHEDULER, SCHEDULER_GRACE_S)
        specs.append(scheduler)
    return specs


def python_spec(
    name: str,
    module: str,
    flags: Sequence[str],
    stop_order: int,
    grace: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> Spec:
    return Spec(name, (sys.executable, "-m", module, *flags), stop_order, grace, environment or {})
