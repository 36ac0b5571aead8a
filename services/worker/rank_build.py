"""One rank from its arguments: what follows from them alone, what the device thread builds of it, and what it then runs."""

from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from k3mesh.errors import ConfigError
from kernels.ops import Ops
from kernels.registry import Choice, format_table
from services.contracts.argument_rules import check_files, check_runnable
from services.contracts.arguments import WorkerArguments
from services.contracts.buffers import expert_buffers
from services.contracts.draft import Draft, DraftConfig
from services.contracts.flags import refusal
from services.contracts.geometry import Geometry
from services.contracts.model import ModelConfig
from services.contracts.placement import Placement
from services.contracts.placement import place as place_fields
from services.contracts.topology import RankPlace, Topology
from services.runtime.telemetry import log
from services.worker import wire
from services.worker.cache.export import AgentLink
from services.worker.cache.image import ImagePool
from services.worker.cache.pools import DTYPES, Pools, allocate
from services.worker.cache.slots import SlotStates
from services.worker.decode_round import DecodeReplica
from services.worker.device import device_of, in_device_order
from services.worker.engine import Runner
from services.worker.fingerprint import model_fingerprint
from services.worker.hop import StageBoundary
from services.worker.memory_profile import DRY_UNITS, DryRun, dry_caches, measured_size, settle_in
from services.worker.model.backends import choose_draft_ops, choose_ops, host_bound, op_geometry
from services.worker.model.batch import ExpertDispatcher, LayerCaches
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.collectives import GlooTensorParallel
from services.worker.parallel.deepep import DeepEpExperts, open_buffer
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import Groups, join
from services.worker.parallel.nccl import NcclGroup
from services.worker.parallel.sole import SoleExperts
from services.worker.prefill_step import PrefillStage
from services.worker.round_check import CheckedRounds
from services.worker.round_graphs import CudaRecorder, GraphRounds, ladder
from services.worker.speculative.build import build_drafter
from services.worker.speculative.drafter import Drafter
from services.worker.speculative.weights import check_embedding


@dataclass(frozen=True)
class Plan:
    """What follows from the arguments alone."""

    arguments: WorkerArguments
    model: ModelConfig
    topology: Topology
    geometry: Geometry
    place: RankPlace
    draft: Draft | None
    device: torch.device

    @classmethod
    def of(cls, arguments: WorkerArguments) -> "Plan":
        check_files(arguments)
        check_runnable(arguments, torch.cuda.is_available())
        model = arguments.load_model_config()
        topology = arguments.topology(model)
        geometry, draft = arguments.geometry(model), arguments.load_draft_config(model)
        return cls(arguments, model, topology, geometry, topology.place_of(arguments.rank), draft, device_of(arguments))

    def record(self, groups: Groups, num_blocks: int, num_slots: int) -> Placement:
        """Where the rank's cache units lie."""
        a = self.arguments
        return place_fields(
            self.geometry,
            self.place,
            engine_id=a.engine_id,
            engine_epoch=groups.epoch,
            model_fingerprint=model_fingerprint(a.model),
            draft_fingerprint=model_fingerprint(a.draft_path) if self.draft is not None else "",
            num_blocks=num_blocks,
            num_slots=num_slots,
            verify_width=a.verify_width,
            speculative_algorithm=a.speculative_algorithm or "NONE",
        )


@dataclass(frozen=True)
class Built:
    """What the device thread has built."""

    groups: Groups
    stage: DecoderStage
    pools: Pools
    drafter: Drafter | None
    host_bound: tuple[str, ...]  # what keeps decode rounds from being captured


def build(plan: Plan) -> Built:
    """On the device thread: meet the other ranks, load this rank's shard, make its pools. On a GPU they get what the rest
    leaves, so the rest comes first."""
    a, device = plan.arguments, plan.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = join(plan.topology, a.rank, a.dist_init_addr, a.startup_timeout, nccl=_own_gpu(plan))
    if device.type == "cpu":
        pools = allocate(plan.record(groups, *a.cache_size(plan.geometry)))
        model = _model(plan, groups, pools.caches)
        return Built(groups, model.stage, pools, model.drafter, model.host_bound)
    dry = dry_caches(plan.record(groups, DRY_UNITS, DRY_UNITS), device)
    model = _model(plan, groups, dry)
    beside = tuple(expert_buffers(a, plan.model, plan.topology)) if model.deepep else ()
    blocks, slots = measured_size(DryRun(a, plan.model, plan.place, model.stage, model.drafter, device, beside))
    pools = allocate(plan.record(groups, groups.least("blocks", blocks, a.startup_timeout), slots), device)
    settle_in(dry, pools.caches)
    return Built(groups, model.stage, replace(pools, caches=dry), model.drafter, model.host_bound)


def _own_gpu(plan: Plan) -> torch.device | None:
    """This rank's, if no other rank of the engine has it too; NCCL connects no others."""
    alone = plan.device.type == "cuda" and plan.arguments.nprocs_per_node <= torch.cuda.device_count()
    return plan.device if alone else None


@dataclass(frozen=True)
class _Model:
    """The rank's part of the target and of the drafter."""

    stage: DecoderStage
    drafter: Drafter | None
    host_bound: tuple[str, ...]
    deepep: bool  # its buffers are no memory of torch's


def _model(plan: Plan, groups: Groups, caches: LayerCaches) -> _Model:
    """Loaded, over these caches."""
    a, model, topology, place = plan.arguments, plan.model, plan.topology, plan.place
    dtype, cache_dtype = DTYPES[a.compute_dtype], DTYPES[a.cache_dtype]
    ops, choices = choose_ops(
        model,
        topology,
        plan.device,
        dtype,
        cache_dtype,
        attention_backend=a.attention_backend,
        kda_backend=a.kda_backend,
        moe_backend=a.moe_backend,
    )
    log.info("kernels", device=str(plan.device), table=format_table(choices))
    weights = load_stage_weights(a.model, model, topology, place, dtype, plan.device)
    experts = _experts(plan, groups)
    stage = DecoderStage(model, topology, place, weights, caches, groups.tp, experts, ops)
    drafter, more = _drafter(plan, groups, caches, stage, experts, ops)
    slow = ["expert dispatch by gloo's rule"] if isinstance(experts, GlooExperts) and groups.ep.size > 1 else []
    slow += ["tensor parallelism over gloo"] if isinstance(groups.tp, GlooTensorParallel) and groups.tp.size > 1 else []
    return _Model(stage, drafter, (*host_bound([*choices, *more]), *slow), isinstance(experts, DeepEpExperts))


def _experts(plan: Plan, groups: Groups) -> SoleExperts | GlooExperts | DeepEpExperts:
    """DeepEP where each rank has a GPU of its own and the package is there; asked for by name it must be."""
    a, ep = plan.arguments, groups.ep
    if plan.device.type == "cuda" and ep.size == 1:
        return SoleExperts()
    if a.all2all_backend == "deepep" and not isinstance(ep, NcclGroup):
        rule = f"{a.nprocs_per_node} ranks of a node share {torch.cuda.device_count()} GPUs"
        raise refusal("all2all_backend", "deepep", rule, "give each rank a GPU of its own, or gloo")
    if isinstance(ep, NcclGroup) and a.all2all_backend != "gloo" and a.compute_dtype == "bfloat16":
        try:
            return _over_deepep(plan, groups)
        except ConfigError as error:
            if a.all2all_backend == "deepep":
                raise
            log.warning("experts' rows do not go by DeepEP", why=error.message)
    return GlooExperts(ep, plan.model.num_experts, a.low_latency_max_num_tokens_per_gpu)


def _over_deepep(plan: Plan, groups: Groups) -> DeepEpExperts:
    a, model, ep, told = plan.arguments, plan.model, groups.ep, count()
    latent, capacity = model.routed_expert_hidden_size, a.low_latency_max_num_tokens_per_gpu
    low_latency = a.disaggregation_mode == "decode" and a.deepep_mode != "normal"
    buffer = open_buffer(
        ep,
        latent=latent,
        num_experts=model.num_experts,
        capacity=capacity,
        low_latency=low_latency,
        gather=lambda value: groups.share(f"deepep-{next(told)}", value, ep.ranks, a.startup_timeout),
    )
    return DeepEpExperts(
        ep,
        buffer,
        latent=latent,
        routes=model.num_experts_per_token,
        num_experts=model.num_experts,
        capacity=capacity,
        low_latency=low_latency,
        device=plan.device,
    )


def _drafter(
    plan: Plan, groups: Groups, caches: LayerCaches, stage: DecoderStage, experts: ExpertDispatcher, ops: Ops
) -> tuple[Drafter | None, tuple[Choice, ...]]:
    a, draft = plan.arguments, plan.draft
    if draft is None:
        return None, ()
    dtype, cache_dtype = DTYPES[a.compute_dtype], DTYPES[a.cache_dtype]
    backend = a.attention_backend if a.drafter_attention_backend == "auto" else a.drafter_attention_backend
    geometry = op_geometry(plan.model, plan.topology, dtype, cache_dtype)
    ops, choices = choose_draft_ops(ops, geometry, draft, plan.topology, plan.device, backend)
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
        caches,
        groups.tp,
        experts,
        ops,
        dtype,
        plan.device,
    )
    check_embedding(Path(a.model), Path(a.draft_path), draft, plan.topology, plan.place)
    return drafter, choices


def runner(plan: Plan, rank: Built, agent: AgentLink) -> Runner:
    """On the device thread: what the rank does with commands."""
    a, place = plan.arguments, plan.place
    if a.disaggregation_mode == "prefill":
        context = plan.draft.hidden_size if isinstance(plan.draft, DraftConfig) else 0
        return PrefillStage(
            rank.stage,
            StageBoundary(rank.groups.pipeline, plan.model, place, DTYPES[a.compute_dtype], context, plan.device),
            in_device_order(agent.post, plan.device),
            index=place.stage,
            states=SlotStates(rank.pools.caches),
            producer_steps=len(plan.geometry.producer_steps(place.stage)),
            interval=a.disaggregation_layerwise_interval,
            verify_width=a.verify_width,
            drafter=rank.drafter,
            device=plan.device,
        )
    return replica(plan, rank)


def replica(plan: Plan, rank: Built) -> DecodeReplica:
    """On the device thread: a decode rank's part of its rounds, captured where that can be."""
    a, place = plan.arguments, plan.place
    built = DecodeReplica(
        rank.stage,
        replica=place.dp,
        places=a.replica_seqs,
        max_model_len=a.max_model_len,
        verify_width=a.verify_width,
        vocab_size=plan.model.vocab_size,
        drafter=rank.drafter,
        images=_images(plan, rank),
        device=plan.device,
    )
    if plan.device.type == "cuda" and a.captures_graphs:
        _capture(plan, rank, built)
    return built


def _capture(plan: Plan, rank: Built, replica: DecodeReplica) -> None:
    """Before the first round; without it all rounds run eager."""
    a = plan.arguments
    if rank.host_bound:
        log.warning("decode rounds run eager: these need the host in a round", what=list(rank.host_bound))
        return
    graphs = GraphRounds(replica.part, ladder(a, rank.drafter), a.replica_seqs, a.verify_width, plan.device)
    graphs.capture(CudaRecorder(plan.device))
    replica.replay(CheckedRounds(graphs, replica.part, SlotStates(rank.pools.caches)) if a.graph_debug else graphs)


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


def hello(plan: Plan, rank: Built) -> wire.WorkerHello:
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
