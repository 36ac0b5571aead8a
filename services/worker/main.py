"""One rank's compute process: `python -m services.worker.main --rank N --listen HOST:PORT --agent-socket PATH …`.

Rank start: arguments, topology, groups (and the epoch), own shard, pools, export to the agent, server, ready. A tensor-
parallel leader is then driven by its scheduler, a peer by its leader. Whatever ends one of these lines ends the epoch.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.ops import Ops
from kernels.registry import format_table
from services.contracts.argument_rules import check_files, check_runnable
from services.contracts.arguments import WorkerArguments
from services.contracts.draft import Draft, DraftConfig
from services.contracts.geometry import Geometry
from services.contracts.model import ModelConfig
from services.contracts.placement import place as place_fields
from services.contracts.topology import RankPlace, Topology
from services.runtime.process import Process, run
from services.runtime.telemetry import log
from services.worker import wire
from services.worker.cache.export import AgentLink
from services.worker.cache.image import ImagePool
from services.worker.cache.pools import DTYPES, Pools, allocate
from services.worker.cache.slots import SlotStates
from services.worker.decode_round import DecodeReplica
from services.worker.engine import Engine, Runner
from services.worker.fingerprint import model_fingerprint
from services.worker.hop import StageBoundary
from services.worker.model.backends import choose_draft_ops, choose_ops, op_geometry
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import Groups, join
from services.worker.prefill_step import PrefillStage
from services.worker.serving import Rank, serve
from services.worker.speculative.build import build_drafter
from services.worker.speculative.drafter import Drafter
from services.worker.speculative.weights import check_embedding

DEVICE = "cpu"


@dataclass(frozen=True)
class Built:
    """What the device thread has built."""

    groups: Groups
    stage: DecoderStage
    pools: Pools
    drafter: Drafter | None


@dataclass(frozen=True)
class Plan:
    """What follows from the arguments alone."""

    arguments: WorkerArguments
    model: ModelConfig
    topology: Topology
    geometry: Geometry
    place: RankPlace
    draft: Draft | None

    @classmethod
    def of(cls, arguments: WorkerArguments) -> "Plan":
        check_files(arguments)
        check_runnable(arguments, torch.cuda.is_available())
        model = arguments.load_model_config()
        topology = arguments.topology(model)
        geometry, draft = arguments.geometry(model), arguments.load_draft_config(model)
        return cls(arguments, model, topology, geometry, topology.place_of(arguments.rank), draft)


async def main(process: Process, arguments: WorkerArguments) -> None:
    plan = Plan.of(arguments)
    await serve(process, arguments, plan.topology.tp_group(plan.place.rank), partial(_rank, plan))


async def _rank(plan: Plan, engine: Engine, stack: AsyncExitStack) -> Rank:
    """Everything on the device, then the agent."""
    a = plan.arguments
    built = await engine.call(lambda: _build(plan))
    stack.callback(built.pools.close)
    agent = await AgentLink.open(a.agent_socket, built.pools, a.startup_timeout)
    stack.callback(agent.close)
    return Rank(_hello(plan, built), _runner(plan, built, agent), agent.watch)


def _build(plan: Plan) -> Built:
    """On the device thread: meet the other ranks, load this rank's shard, make its pools."""
    a, model, topology, place = plan.arguments, plan.model, plan.topology, plan.place
    groups = join(topology, a.rank, a.dist_init_addr, a.startup_timeout)
    dtype, cache_dtype = DTYPES[a.compute_dtype], DTYPES[a.cache_dtype]
    ops, choices = choose_ops(
        model,
        topology,
        DEVICE,
        dtype,
        cache_dtype,
        attention_backend=a.attention_backend,
        kda_backend=a.kda_backend,
        moe_backend=a.moe_backend,
    )
    log.info("kernels", table=format_table(choices))
    weights = load_stage_weights(a.model, model, topology, place, dtype, DEVICE)
    num_blocks, num_slots = a.cache_size(plan.geometry)
    pools = allocate(
        place_fields(
            plan.geometry,
            place,
            engine_id=a.engine_id,
            engine_epoch=groups.epoch,
            model_fingerprint=model_fingerprint(a.model),
            draft_fingerprint=model_fingerprint(a.draft_path) if plan.draft is not None else "",
            num_blocks=num_blocks,
            num_slots=num_slots,
            verify_width=a.verify_width,
            speculative_algorithm=a.speculative_algorithm or "NONE",
        )
    )
    experts = GlooExperts(groups.ep, model.num_experts, a.low_latency_max_num_tokens_per_gpu)
    stage = DecoderStage(model, topology, place, weights, pools.caches, groups.tp, experts, ops)
    return Built(groups, stage, pools, _drafter(plan, groups, pools, stage, experts, ops))


def _drafter(plan: Plan, groups: Groups, pools: Pools, stage: DecoderStage, experts: GlooExperts, ops: Ops) -> Drafter | None:
    a, draft = plan.arguments, plan.draft
    if draft is None:
        return None
    dtype, cache_dtype = DTYPES[a.compute_dtype], DTYPES[a.cache_dtype]
    backend = a.attention_backend if a.drafter_attention_backend == "auto" else a.drafter_attention_backend
    geometry = op_geometry(plan.model, plan.topology, dtype, cache_dtype)
    ops, choices = choose_draft_ops(ops, geometry, draft, plan.topology, DEVICE, backend)
    log.info("drafter", algorithm=a.speculative_algorithm, width=a.verify_width, table=format_table(choices))
    if isinstance(draft, DraftConfig) and draft.confidence_head:
        log.info("the drafter's confidence head is not used: rounds narrow by measured acceptance")
    drafter = build_drafter(
        a.draft_path,
        draft,
        plan.model,
        plan.topology,
        plan.place,
        stage,
        pools.caches,
        groups.tp,
        experts,
        ops,
        dtype,
    )
    check_embedding(Path(a.model), Path(a.draft_path), draft, plan.topology, plan.place)
    return drafter


def _runner(plan: Plan, rank: Built, agent: AgentLink) -> Runner:
    a, place = plan.arguments, plan.place
    if a.disaggregation_mode == "prefill":
        context = plan.draft.hidden_size if isinstance(plan.draft, DraftConfig) else 0
        return PrefillStage(
            rank.stage,
            StageBoundary(rank.groups.pipeline, plan.model, place, DTYPES[a.compute_dtype], context),
            agent.post,
            index=place.stage,
            states=SlotStates(rank.pools.caches),
            producer_steps=len(plan.geometry.producer_steps(place.stage)),
            interval=a.disaggregation_layerwise_interval,
            verify_width=a.verify_width,
            drafter=rank.drafter,
        )
    return DecodeReplica(
        rank.stage,
        replica=place.dp,
        places=a.replica_seqs,
        max_model_len=a.max_model_len,
        verify_width=a.verify_width,
        vocab_size=plan.model.vocab_size,
        drafter=rank.drafter,
        images=_images(plan, rank),
    )


def _images(plan: Plan, rank: Built) -> ImagePool:
    pool = ImagePool(rank.pools.caches, _image_blocks(plan, rank), rank.groups.tp)
    log.info(
        "host memory for suspended requests",
        blocks=len(pool),
        bytes=len(pool) * pool.block_bytes,
        blocks_of_a_state=pool.state_blocks,
        requests=plan.arguments.replica_seqs if len(pool) else 0,
    )
    return pool


def _image_blocks(plan: Plan, rank: Built) -> int:
    record = rank.pools.placement
    return plan.arguments.image_blocks(plan.geometry, record.num_blocks, record.num_slots)


def _hello(plan: Plan, rank: Built) -> wire.WorkerHello:
    record = rank.pools.placement
    return wire.WorkerHello(
        engine_id=record.engine_id,
        engine_epoch=record.engine_epoch,
        rank=record.global_rank,
        num_blocks=record.num_blocks,
        num_slots=record.num_slots,
        model_fingerprint=record.model_fingerprint,
        model_name=plan.arguments.served_model_name,
        vocab_size=plan.model.vocab_size,
        end_token_ids=plan.model.eos_token_ids,
        max_position=plan.model.max_position_embeddings,
        draft_fingerprint=record.draft_fingerprint,
        image_blocks=_image_blocks(plan, rank),
        state_blocks=plan.geometry.state_blocks,
    )


if __name__ == "__main__":
    run("worker", main, WorkerArguments)
