"""`k3mesh plan`: each rank's memory for given flags, part by part, and what fits. Reads config.json alone, starts nothing.

k3mesh plan                                              Kimi K3 on 64 H200s, the deployment guide's flags
k3mesh plan --topology laptop --model DIR                both engines on this machine
k3mesh plan --disaggregation-mode decode --model DIR …   one engine, with the flags of `k3mesh serve`
"""

import json
from typing import Any

from pydantic import Field

from services.contracts.arguments import EngineArguments
from services.contracts.buffers import GIB, MIB
from services.contracts.capacity import EngineCapacity, capacity_of
from services.contracts.machine import MachineArguments
from services.contracts.mesh import MeshArguments
from services.contracts.topologies import TopologyName
from services.launch.child import ROOT
from services.launch.fits import host_memory

K3_FOLDER = str(ROOT / "models" / "k3")


class PlanArguments(MachineArguments, MeshArguments):
    """k3mesh plan, for both engines of a named topology."""

    topology: TopologyName = Field(default="k3", description="named argument sets of both engines")
    model: str = Field(default=K3_FOLDER, description="directory with config.json; Kimi K3's if unset")


class EnginePlanArguments(MachineArguments, EngineArguments):
    """k3mesh plan, for one engine."""

    model: str = Field(default=K3_FOLDER, description="directory with config.json; Kimi K3's if unset")


def main(argv: list[str]) -> int:
    """Print the plan and return 0; ConfigError for what does not fit."""
    if any(word.partition("=")[0] == "--disaggregation-mode" for word in argv):
        arguments: MachineArguments = EnginePlanArguments.parse(argv, "k3mesh plan")
        assert isinstance(arguments, EnginePlanArguments)
        engines: tuple[EngineArguments, ...] = (arguments,)
    else:
        arguments = PlanArguments.parse(argv, "k3mesh plan")
        assert isinstance(arguments, PlanArguments)
        engines = arguments.engines()
    found = [capacity_of(engine, arguments.memory_of(engine)) for engine in engines]
    if arguments.as_json:
        print(json.dumps([as_json(it) for it in found], indent=1))
    else:
        print("\n\n".join("\n".join(table(it)) for it in found))
    return 0


def table(it: EngineCapacity) -> list[str]:
    """One column for each stage; all ranks of a stage or a replica are alike."""
    topology, a = it.topology, it.arguments
    names = list(dict.fromkeys(part.name for rank in it.ranks for part in rank.parts))
    heads = [f"stage {rank.place.stage}" for rank in it.ranks] if topology.stages > 1 else ["rank"]
    rows = [(name, [{p.name: p.bytes for p in rank.parts}.get(name, 0) for rank in it.ranks]) for name in names]
    rows.append((f"{it.blocks} cache blocks", [it.blocks * rank.block_bytes for rank in it.ranks]))
    rows.append((f"{it.slots} KDA slots", [it.slots * rank.slot_bytes for rank in it.ranks]))
    rows.append(("together", [it.total(rank) for rank in it.ranks]))
    unit, name = (GIB, "GiB") if it.memory is not None else (MIB, "MiB")
    lines = [
        f"{a.engine_id}: {topology.world_size} ranks, PP{topology.stages} DP{topology.dp_size} TP{topology.tp_size} "
        f"EP{topology.ep_size}, {name} of each rank",
        f"  {'':<30}" + "".join(f"{head:>10}" for head in heads),
    ]
    lines += [f"  {name:<30}" + "".join(f"{bytes_ / unit:>10.2f}" for bytes_ in values) for name, values in rows]
    if it.memory is not None:
        lines.append(f"  {'of':<30}" + "".join(f"{it.memory / unit:>10.2f}" for _ in it.ranks))
    else:
        node = it.node_bytes(a.node_rank)
        lines.append(f"  all ranks of node {a.node_rank}: {node / GIB:.2f} GiB of this host's {host_memory() / GIB:.1f}")
    what = "a replica" if topology.role == "decode" else "the engine"
    each = it.replica_tokens // a.replica_seqs
    lines.append(
        f"  {what} holds {it.replica_tokens:,} tokens and {a.replica_seqs} requests: {each:,} tokens each, "
        f"or {it.full_requests} of {a.max_model_len:,}"
    )
    if it.image_bytes:
        lines.append(f"  images of retracted requests: {it.image_bytes / GIB:.2f} GiB of host memory for each rank, at most")
    return lines


def as_json(it: EngineCapacity) -> dict[str, Any]:
    """The same in bytes."""
    return {
        "engine": it.arguments.engine_id,
        "memory": it.memory,
        "blocks": it.blocks,
        "slots": it.slots,
        "tokens": it.replica_tokens,
        "requests": it.arguments.replica_seqs,
        "full_requests": it.full_requests,
        "image_bytes": it.image_bytes,
        "ranks": [
            {
                "stage": rank.place.stage,
                "parts": {part.name: part.bytes for part in rank.parts},
                "block_bytes": rank.block_bytes,
                "slot_bytes": rank.slot_bytes,
                "cache": rank.cache(it.blocks, it.slots),
                "total": it.total(rank),
            }
            for rank in it.ranks
        ],
    }
