"""How much of its GPU a rank has for caches: it runs one largest batch that belongs to nobody, and measures.

The batch needs caches of one block and one slot, in which all of its rows lie on each other. The model keeps the tensors that
it was built on: when the true caches are there, those tensors get their memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.contracts.arguments import EngineArguments
from services.contracts.buffers import CUDA_LIBRARIES, MIB, Part, graph_bytes, staging_bytes
from services.contracts.capacity import Measured, capacity_of
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.model import ModelConfig
from services.contracts.placement import Placement
from services.contracts.topology import RankPlace
from services.runtime.telemetry import log
from services.worker.cache.pools import DTYPES
from services.worker.model.batch import ForwardBatch, Hop, LayerCaches
from services.worker.model.decoder import DecoderStage
from services.worker.round_part import EagerRounds, RoundPart, RoundShape
from services.worker.round_rows import RoundRows, Rows
from services.worker.speculative.drafter import Drafter, Steps
from services.worker.speculative.verify import choose

DRY_UNITS = 2  # blocks and slots: the null one, and one for everybody


@dataclass(frozen=True)
class DryRun:
    """What is run: a rank's model over dry caches."""

    arguments: EngineArguments
    model: ModelConfig
    place: RankPlace
    stage: DecoderStage
    drafter: Drafter | None
    device: torch.device
    beside: tuple[Part, ...] = ()  # of the GPU's memory, that torch does not manage


def dry_caches(record: Placement, device: torch.device) -> LayerCaches:
    """Caches of the record's fields, to build a model on before their number is known."""
    views: dict[str, dict[int, Tensor]] = {arena.name: {} for arena in record.arenas}
    names = {arena.arena_id: arena.name for arena in record.arenas}
    for field in record.fields:
        shape = (DRY_UNITS, *field.shape)
        views[names[field.arena_id]][field.layer] = torch.zeros(shape, dtype=DTYPES[field.dtype], device=device)
    return LayerCaches(**{name: views.get(name, {}) for name in ("mla", "kda_rec", "kda_conv", "draft")})


def settle_in(dry: LayerCaches, pools: LayerCaches) -> None:
    """The tensors of `dry`, which the model holds, become those of `pools`."""
    for name in ("mla", "kda_rec", "kda_conv", "draft"):
        for layer, tensor in getattr(dry, name).items():
            tensor.set_(getattr(pools, name)[layer])


def measured_size(it: DryRun) -> tuple[int, int]:
    """(blocks, slots) of this rank, by `capacity_of` with what the rank takes in truth. ConfigError if too little is left.
    Collective over TP and EP."""
    a, device = it.arguments, it.device
    torch.cuda.empty_cache()  # what loading has left over
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    (_largest_chunk if a.disaggregation_mode == "prefill" else _largest_round)(it)
    torch.cuda.synchronize(device)
    batch = torch.cuda.max_memory_reserved(device) - weights
    torch.cuda.empty_cache()
    parts = [
        Part("weights", weights),
        Part("a largest batch", batch),
        Part("graphs", batch + graph_bytes(a) if a.captures_graphs else 0),  # they have a pool of their own for their batches
        *it.beside,
        Part("staging frames", staging_bytes()),
        Part("libraries", CUDA_LIBRARIES),
    ]
    total = torch.cuda.get_device_properties(device).total_memory
    found = capacity_of(a, int(total * a.gpu_memory_utilization), Measured(it.place, tuple(parts)))
    log.info(
        "memory of the GPU",
        mib={part.name: part.bytes // MIB for part in parts},
        of_mib=total // MIB,
        utilization=a.gpu_memory_utilization,
        blocks=found.blocks,
        slots=found.slots,
    )
    return found.blocks, found.slots


def _largest_chunk(it: DryRun) -> None:
    """--chunked-prefill-size rows of one prompt, then everybody's first token."""
    rows, device = it.arguments.chunked_prefill_size, it.device
    positions = torch.arange(rows, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        mode="extend",
        tokens=torch.zeros_like(positions),
        positions=positions,
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device=device),
        context_lens=torch.tensor([rows], dtype=torch.int32, device=device),
        block_tables=torch.ones((1, -(-rows // BLOCK_TOKENS) + 1), dtype=torch.int32, device=device),
        write_slots=BLOCK_TOKENS + positions % BLOCK_TOKENS,
        slots=one,
        fresh=one.bool(),
    )
    hop = _hop(it, rows)
    capture = it.drafter.begin(rows, hop) if it.drafter is not None else None
    out = it.stage.forward(batch, hop, lambda step: None, capture.take if capture is not None else None)
    if isinstance(out, Hop):
        return
    choose(it.stage.logits(out[: it.arguments.max_num_seqs]).unsqueeze(1), [], [])
    if it.drafter is not None and capture is not None:
        most = it.arguments.verify_width - 1
        it.drafter.draft(batch, out, capture, batch.tokens, one * (rows - 1), Steps(most, most))


def _hop(it: DryRun, rows: int) -> Hop | None:
    if it.place.stage == 0:
        return None
    shape, dtype = (rows, it.model.hidden_size), DTYPES[it.arguments.compute_dtype]
    closed = it.model.closed_blocks_before(it.place.window.start)
    blocks = torch.zeros((closed, *shape), dtype=dtype, device=it.device)
    context = it.drafter.context_rows(rows) if it.drafter is not None else None
    return Hop(torch.zeros(shape, dtype=dtype, device=it.device), blocks, context)


def _largest_round(it: DryRun) -> None:
    """All places, at full width."""
    a = it.arguments
    state = Rows(1, 1, a.verify_width)
    state.slots[0] = state.tables[0, 0] = 1
    rows = RoundRows(a.replica_seqs, 1, a.verify_width, it.device)
    rows.fill(state, torch.zeros(a.replica_seqs, dtype=torch.int64))
    most = a.verify_width - 1
    shape = RoundShape(a.replica_seqs, a.verify_width, Steps(most, most))
    rounds = EagerRounds(RoundPart(it.stage, it.drafter, rows, a.verify_width, it.device))
    logits = rounds.evaluate(shape).unflatten(0, (-1, a.verify_width))
    rounds.settle(shape, choose(logits, [], []))
