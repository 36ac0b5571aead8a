"""What one engine needs of each rank's memory, and what then fits: weights, cache, buffers, image pool. Pure, and exact where
the tables are exact: weights by sharding's targets, cache by the placement record's arenas; the rest is in buffers.

On GPUs the cache gets what the rest leaves; on a host it has the size that the engine takes by itself, by
EngineArguments.cache_size, and all ranks share the host's memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from k3mesh.errors import ConfigError
from services.contracts import sharding
from services.contracts.arguments import EngineArguments
from services.contracts.buffers import GIB, MIB, Draft, Part, working_parts
from services.contracts.draft import DraftConfig
from services.contracts.draft_sharding import DraftPart, dspark_targets
from services.contracts.flags import refusal
from services.contracts.geometry import ITEM_BYTES, PAGED, SLOT, Geometry
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.model import ModelConfig
from services.contracts.placement import place as place_fields
from services.contracts.topology import RankPlace, Topology

GPUS = {"h100": 81_559 * MIB, "h200": 143_771 * MIB}  # bytes of the device, as nvidia-smi names them


@dataclass(frozen=True)
class RankCapacity:
    """One rank of a stage (prefill) or of a replica (decode); the others beside it have the same."""

    place: RankPlace
    parts: tuple[Part, ...]  # all but the cache
    block_bytes: int  # of the stage's own fields
    slot_bytes: int

    @property
    def fixed(self) -> int:
        return sum(part.bytes for part in self.parts)

    def cache(self, blocks: int, slots: int) -> int:
        return blocks * self.block_bytes + slots * self.slot_bytes

    def blocks_in(self, memory: int, slots: int) -> int:
        """Blocks that fit beside everything else, the null block included; below 0 if not even the rest fits."""
        return (memory - self.fixed - slots * self.slot_bytes) // max(1, self.block_bytes)


@dataclass(frozen=True)
class EngineCapacity:
    """One engine. `memory` is what a rank has on a GPU, None on a host."""

    arguments: EngineArguments
    model: ModelConfig
    geometry: Geometry
    ranks: tuple[RankCapacity, ...]  # the first of each stage
    memory: int | None
    blocks: int  # of one rank, the null block included
    slots: int

    @property
    def topology(self) -> Topology:
        return self.geometry.topology

    @property
    def replica_tokens(self) -> int:
        """Cached tokens of one replica."""
        return (self.blocks - 1) * BLOCK_TOKENS

    @property
    def full_requests(self) -> int:
        """Requests of --max-model-len that one replica holds at once."""
        return min(self.arguments.replica_seqs, max(0, self.blocks - 1) // self.arguments.request_blocks)

    def total(self, rank: RankCapacity) -> int:
        return rank.fixed + rank.cache(self.blocks, self.slots)

    @property
    def image_bytes(self) -> int:
        """Host memory of one rank for the images of retracted requests (spec scheduling §3.5)."""
        return self.arguments.image_blocks(self.geometry, self.blocks, self.slots) * self.geometry.block_bytes

    def node_bytes(self, node: int) -> int:
        """All ranks of one node on a host, where they share its memory; the image pools too."""
        per_node, stage_world = self.arguments.nprocs_per_node, self.topology.stage_world
        ranks = range(node * per_node, (node + 1) * per_node)
        return sum(self.total(self.ranks[rank // stage_world]) + self.image_bytes for rank in ranks)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank has found itself to take, instead of what is computed: all but the cache."""

    place: RankPlace
    parts: tuple[Part, ...]


def capacity_of(a: EngineArguments, memory: int | None, measured: Measured | None = None) -> EngineCapacity:
    """What the engine takes, and what fits into `memory` bytes of each rank's GPU; None: it runs on a host. With `measured` it
    is that rank alone.

    ConfigError if the weights and buffers of a rank leave no room for its slots and one request, or --num-blocks is more than
    what they leave. Names value, rule and what would fit.
    """
    model = a.load_model_config()
    geometry, draft = a.geometry(model), a.load_draft_config(model)
    topology, slots = geometry.topology, a.cache_slots(geometry)
    if measured is not None:
        ranks: tuple[RankCapacity, ...] = (_of_parts(geometry, measured.place, measured.parts),)
    else:
        places = [topology.place_of(topology.rank_of(stage, 0, 0)) for stage in range(topology.stages)]
        ranks = tuple(_rank(a, model, geometry, draft, place, memory is not None) for place in places)
    if memory is None:
        blocks, _ = a.cache_size(geometry)
    else:
        blocks = a.num_blocks or min(rank.blocks_in(memory, slots) for rank in ranks)
    it = EngineCapacity(a, model, geometry, ranks, memory, blocks, slots)
    if memory is not None:
        _check_gpu(it, memory)
    return it


def weight_bytes(a: EngineArguments, model: ModelConfig, topology: Topology, place: RankPlace) -> int:
    """What the loader puts into this rank's memory of the target."""
    return _bytes_of(sharding.stage_targets(model, topology, place), a.compute_dtype)


def draft_weight_bytes(a: EngineArguments, model: ModelConfig, topology: Topology, place: RankPlace, draft: Draft) -> int:
    """Likewise of the drafter."""
    if draft is None:
        return 0
    if isinstance(draft, DraftConfig):
        share = sharding.Share(place.tp, topology.tp_size)
        return _bytes_of(dspark_targets(draft, DraftPart.of(draft, topology, place), share), a.compute_dtype)
    if place.stage != topology.last_stage:
        return 0
    return _bytes_of(sharding.nextn_targets(model, topology, place, embedding=place.stage > 0), a.compute_dtype)


def _bytes_of(targets: Iterable[sharding.Target], dtype: str) -> int:
    item = {sharding.MODEL: ITEM_BYTES[dtype], sharding.FLOAT32: 4, sharding.PACKED: 1}
    return sum(prod(target.shape) * item[target.dtype] for target in targets)


def _rank(
    a: EngineArguments, model: ModelConfig, geometry: Geometry, draft: Draft, place: RankPlace, gpu: bool
) -> RankCapacity:
    topology = geometry.topology
    parts = [Part("weights", weight_bytes(a, model, topology, place))]
    if drafter := draft_weight_bytes(a, model, topology, place, draft):
        parts.append(Part("drafter's weights", drafter))
    parts += working_parts(a, model, topology, place, draft, gpu)
    return _of_parts(geometry, place, parts)


def _of_parts(geometry: Geometry, place: RankPlace, parts: Iterable[Part]) -> RankCapacity:
    block, slot = (_unit_bytes(geometry, place, kind) for kind in (PAGED, SLOT))
    return RankCapacity(place, tuple(part for part in parts if part.bytes), block, slot)


def _unit_bytes(geometry: Geometry, place: RankPlace, kind: str) -> int:
    """Of one unit over the stage's fields, with the alignment that the arenas have."""
    record = place_fields(
        geometry, place, engine_id="", engine_epoch=0, model_fingerprint="", num_blocks=1, num_slots=1, verify_width=1
    )
    return sum(field.unit_stride for field in record.fields if field.kind == kind)


def _check_gpu(it: EngineCapacity, memory: int) -> None:
    a, slots = it.arguments, it.slots
    tightest = min(it.ranks, key=lambda rank: rank.blocks_in(memory, slots))
    fits = tightest.blocks_in(memory, slots)
    where = f"stage {tightest.place.stage}" if it.topology.stages > 1 else "a rank"
    largest = sorted(tightest.parts, key=lambda part: -part.bytes)[:3]
    beside = ", ".join(f"{part.name} {part.bytes / GIB:.1f} GiB" for part in largest)
    if tightest.fixed + tightest.cache(2, 2) > memory:
        raise ConfigError(
            f"{a.engine_id}: {where} needs {tightest.fixed / GIB:.1f} GiB before any cache ({beside}), the GPU has "
            f"{memory / GIB:.1f} GiB for it; use more GPUs (--expert-parallel-size, --pipeline-parallel-size), "
            "--low-latency-max-num-tokens-per-gpu, or a larger --gpu"
        )
    if fits < 2:
        room = (memory - tightest.fixed - tightest.cache(2, 0)) // max(1, tightest.slot_bytes)
        raise refusal(
            "num_slots" if a.num_slots else "max_num_seqs", a.num_slots or a.max_num_seqs,
            f"{slots} KDA slots of {tightest.slot_bytes / MIB:.1f} MiB do not fit on {where} beside {beside}",
            f"{room} slots fit, the null slot included",
        )  # fmt: skip
    if a.num_blocks > fits:
        raise refusal(
            "num_blocks", a.num_blocks,
            f"{where} has room for {fits} blocks of {tightest.block_bytes / MIB:.2f} MiB beside {beside} and {slots} slots",
            f"give at most {fits}, or leave it out",
        )  # fmt: skip
    if it.full_requests < 1:
        why = f"--num-blocks {a.num_blocks} has" if a.num_blocks else f"beside {beside} {where} has room for"
        raise refusal(
            "max_model_len", a.max_model_len,
            f"one such request needs {a.request_blocks} blocks, {why} {it.blocks - 1} beside the null block",
            f"lower it to at most {max(0, (it.blocks - 1) * BLOCK_TOKENS - 2 * a.verify_width)}",
        )  # fmt: skip


def check_host(engines: Iterable[EngineCapacity], node: int, memory: int, services: int = 0) -> None:
    """Whether engines on this node of a host fit into its memory, `services` bytes of other processes beside them. ConfigError
    names the largest parts and flags."""
    found = list(engines)
    total = services + sum(it.node_bytes(node) for it in found)
    if total <= memory:
        return
    lines = [
        f"{it.arguments.engine_id} {it.node_bytes(node) / GIB:.1f} GiB (of it "
        f"{max(rank.cache(it.blocks, it.slots) for rank in it.ranks) / GIB:.2f} GiB of cache on each rank)"
        for it in found
    ]
    given = [("num_blocks", it.arguments.num_blocks) for it in found if it.arguments.num_blocks]
    field, value = max(given, key=lambda pair: pair[1], default=("max_num_seqs", found[0].arguments.max_num_seqs))
    raise refusal(
        field, value,
        f"the ranks of this node need {total / GIB:.1f} GiB, the host has {memory / GIB:.1f} GiB: {', '.join(lines)}",
        "give fewer blocks, a lower --max-model-len or --max-num-seqs, or a smaller model",
    )  # fmt: skip
