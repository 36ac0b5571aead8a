"""`k3mesh check`: the rules of a start without the start, and the plan that comes out of them.

k3mesh check --topology laptop --model DIR [--prefill "..."] [--decode "..."]
k3mesh check --disaggregation-mode decode --model DIR ...          one engine, with the flags of `k3mesh serve`
"""

from k3mesh.errors import ConfigError
from services.contracts import argument_rules as rules
from services.contracts.arguments import EngineArguments
from services.contracts.capacity import EngineCapacity
from services.contracts.mesh import MeshArguments
from services.launch.fits import check_engines, has_cuda


def main(argv: list[str]) -> int:
    """Print the plan and return 0; ConfigError for what no machine could run."""
    if any(word.partition("=")[0] == "--disaggregation-mode" for word in argv):
        engines: tuple[EngineArguments, ...] = (EngineArguments.parse(argv, "k3mesh check"),)
    else:
        engines = MeshArguments.parse(argv, "k3mesh check").engines()
    for it in check_engines(engines):
        print("\n".join(plan(it)))
    return 0


def plan(it: EngineCapacity) -> list[str]:
    """One engine as lines of text: shape, ranks, cache, limits, what this machine says to it."""
    engine, model, topology = it.arguments, it.model, it.topology
    cache = max(rank.cache(it.blocks, it.slots) for rank in it.ranks)
    memory = max(it.total(rank) for rank in it.ranks)
    lines = [
        f"{engine.engine_id}: {engine.disaggregation_mode}, {topology.world_size} ranks on {engine.nnodes} node(s): "
        f"PP{topology.stages} DP{topology.dp_size} TP{topology.tp_size} EP{topology.ep_size}, {engine.compute_dtype}"
    ]
    for leader in topology.leaders:
        place = topology.place_of(leader)
        part = f"stage {place.stage}" if topology.role == "prefill" else f"replica {place.dp}"
        ranks = f"ranks {leader}-{leader + topology.tp_size - 1}" if topology.tp_size > 1 else f"rank {leader}"
        node = leader // engine.nprocs_per_node
        lines.append(f"  {part}: {ranks} on node {node}, layers {place.window.start}-{place.window.stop - 1}")
    experts = model.num_experts // topology.ep_size
    lines.append(f"  experts: {experts} of {model.num_experts} on each rank")
    lines.append(
        f"  cache of a rank, at most: {it.blocks} blocks of 128 tokens and {it.slots} KDA slots, {cache / 2**20:.1f} MiB "
        f"({engine.cache_dtype}, recurrent state float32)"
    )
    lines.append(f"  memory of a rank, at most: {memory / 2**20:.0f} MiB; `k3mesh plan` tells its parts")
    if topology.role == "prefill":
        lines.append(f"  limits: {engine.max_num_seqs} requests, {engine.chunked_prefill_size} tokens a batch")
    else:
        buckets = ",".join(str(size) for size in engine.buckets())
        lines.append(
            f"  limits: {engine.replica_seqs} requests a replica, verify width {engine.verify_width}, buckets {buckets}"
        )
    lines += [f"  note: {note}" for note in rules.notes(engine)]
    try:
        rules.check_runnable(engine, has_cuda())
        lines.append("  on this machine: can start")
    except ConfigError as refusal:
        lines.append(f"  on this machine: refused: {refusal.message}")
    return lines
