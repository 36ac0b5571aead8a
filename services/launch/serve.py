"""`k3mesh serve`: one node of one engine, in the foreground, with the deployment guide's flags word for word.

Every node of an engine runs it with the same flags and its own --node-rank. Node 0 also runs the engine's scheduler. Ports
are the same on each node: scheduler at --port-base, then one for each local worker, for each local agent, and for its links.
"""

import sys
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.contracts import argument_rules as rules
from services.contracts.arguments import EngineArguments
from services.contracts.flags import Address, Words, refusal
from services.launch.engine import engine_specs, lay_out, ports_needed
from services.launch.fits import check_engines, has_cuda
from services.launch.ports import require_free
from services.launch.state import StateDir
from services.launch.supervisor import Group, Supervisor
from services.runtime.process import Process, run
from services.runtime.telemetry import log


class ServeArguments(EngineArguments):
    """k3mesh serve."""

    node_hosts: Words = Field(default=("127.0.0.1",), description="host of each node of this engine, in --node-rank order")
    port_base: int = Field(default=21000, ge=1024, le=65000, description="first of this engine's ports on each node")
    decode_address: Address | None = Field(default=None, description="HOST:PORT of the decode scheduler (prefill, node 0)")
    state_dir: str = Field(default=".state", description="directory for this node's logs and sockets")

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        self.fill({name: str(Path(getattr(self, name)).resolve()) for name in ("model", "tokenizer", "state_dir")})
        if len(self.node_hosts) != self.nnodes:
            raise refusal(
                "node_hosts", self.node_hosts, f"names {len(self.node_hosts)} of --nnodes {self.nnodes} nodes",
                "name each node's host once, in --node-rank order",
            )  # fmt: skip
        if self.nnodes > 1 and self.dist_init_addr == EngineArguments.model_fields["dist_init_addr"].default:
            raise refusal(
                "dist_init_addr", self.dist_init_addr, "is not reachable from other nodes", "give HOST:PORT of node 0"
            )
        if self.disaggregation_mode == "prefill" and self.node_rank == 0 and self.decode_address is None:
            raise refusal("decode_address", "", "node 0 of a prefill engine needs it", "give the decode scheduler's HOST:PORT")
        return self


def main(argv: list[str]) -> int:
    sys.argv[1:] = argv
    run("node", serve, ServeArguments)
    return 0


async def serve(process: Process, arguments: ServeArguments) -> None:
    """Run this node's processes until told to stop. Everything that can be refused is refused before the first one starts."""
    check_engines((arguments,))
    rules.check_runnable(arguments, has_cuda())
    for note in rules.notes(arguments):
        log.warning(note)
    state = StateDir(arguments.state_dir)
    state.create()
    state.lock()
    nprocs = arguments.nprocs_per_node
    ports = range(arguments.port_base, arguments.port_base + ports_needed(nprocs))
    for port in ports:
        require_free(arguments.node_hosts[arguments.node_rank], port, "port_base")
    addresses = lay_out(arguments.node_hosts, nprocs, ports)
    specs = engine_specs(arguments, addresses, state, arguments.decode_address)
    group = Group(arguments.engine_id, specs, state, arguments.startup_timeout)

    async def started() -> None:
        process.ready()

    try:
        await Supervisor([[group]]).run(process.stopping, started)
    finally:
        state.clear_run()
