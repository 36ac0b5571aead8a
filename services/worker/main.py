"""One rank's compute process: `python -m services.worker.main --rank N --listen HOST:PORT --agent-socket PATH …`.

Rank start: arguments, topology, groups (and the epoch), own shard, pools, export to the agent, server, ready. A tensor-
parallel leader is then driven by its scheduler, a peer by its leader. Whatever ends one of these lines ends the epoch.
"""

from contextlib import AsyncExitStack
from functools import partial

from services.contracts.arguments import WorkerArguments
from services.runtime.process import Process, run
from services.worker.cache.export import AgentLink
from services.worker.device import memory_peak
from services.worker.engine import Engine
from services.worker.rank_build import Plan, build, hello, runner
from services.worker.serving import Rank, serve


async def main(process: Process, arguments: WorkerArguments) -> None:
    plan = Plan.of(arguments)
    await serve(process, arguments, plan.topology.tp_group(plan.place.rank), partial(_rank, plan))


async def _rank(plan: Plan, engine: Engine, stack: AsyncExitStack) -> Rank:
    """Everything on the device, then the agent."""
    a = plan.arguments
    built = await engine.call(lambda: build(plan))
    stack.callback(built.pools.close)
    agent = await AgentLink.open(a.agent_socket, built.pools, a.startup_timeout)
    stack.callback(agent.close)
    run = await engine.call(lambda: runner(plan, built, agent))
    pools = sum(arena.length for arena in built.pools.placement.arenas)
    return Rank(hello(plan, built), run, agent.watch, lambda: memory_peak(plan.device, pools))


if __name__ == "__main__":
    run("worker", main, WorkerArguments)
