"""Rules between flags, in the order topology → parallel sizes → scheduling → backends → cache → speculation → role
(spec scheduling §10). Each refusal names flag, value, rule and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3mesh.errors import ConfigError
from services.contracts.flags import flag, refusal
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.model import ModelConfig

if TYPE_CHECKING:
    from services.contracts.arguments import EngineArguments

GPU_BACKENDS = {  # flag → (values, what runs on a CPU instead)
    "attention_backend": (("flashmla",), "reference"),
    "drafter_attention_backend": (("flashmla",), "reference"),
    "kda_backend": (("flashkda",), "reference"),
    "moe_backend": (("wgmma", "marlin"), "reference"),
    "all2all_backend": (("deepep",), "gloo"),
}


def derive(a: EngineArguments) -> dict[str, Any]:
    """What unset flags are, from those that are set. Refuses what cannot be resolved."""
    pp = a.pipeline_parallel_size
    world = a.world_size or (a.nnodes * a.nprocs_per_node) or pp * (a.attn_tp_size or 1) * (a.data_parallel_size or 1)
    if world % pp:
        raise refusal("world_size", world, f"must be divisible by --pipeline-parallel-size {pp}", "change either")
    stage = world // pp
    dp = a.data_parallel_size or (stage // a.attn_tp_size if a.attn_tp_size else 1)
    tp = a.attn_tp_size or stage // max(1, dp)
    if tp * dp != stage:
        raise refusal(
            "world_size", world,
            f"one stage has {stage} ranks, but --attn-tp-size {tp} x --data-parallel-size {dp} is {tp * dp}",
            f"the world is stages x attention TP x DP: {pp * tp * dp}",
        )  # fmt: skip
    if world % a.nnodes:
        raise refusal("nnodes", a.nnodes, f"--world-size {world} does not divide over them", "change either")
    moe_tp = a.moe_tp_size or 1
    default_seqs = 80 if a.speculative_algorithm else 160
    return {
        "world_size": world,
        "nprocs_per_node": a.nprocs_per_node or world // a.nnodes,
        "attn_tp_size": tp,
        "data_parallel_size": dp,
        "dense_tp_size": a.dense_tp_size or tp,
        "moe_tp_size": moe_tp,
        "expert_parallel_size": a.expert_parallel_size or max(1, stage // moe_tp),
        "max_num_seqs": a.max_num_seqs or default_seqs // dp * dp or dp,
        "max_cudagraph_capture_size": a.max_cudagraph_capture_size or default_seqs,
        "chunked_prefill_size": a.chunked_prefill_size - a.chunked_prefill_size % BLOCK_TOKENS,
        "enforce_eager": a.enforce_eager or pp > 1,
        "engine_id": a.engine_id or f"{a.disaggregation_mode}-0",
        **derive_names(a.model, a.served_model_name, a.tokenizer),
    }


def derive_names(model: str, served_model_name: str, tokenizer: str) -> dict[str, str]:
    return {"served_model_name": served_model_name or Path(model).name, "tokenizer": tokenizer or model}


def check(a: EngineArguments) -> None:
    """Every rule that needs no model, file or device."""
    _topology(a)
    _parallel_sizes(a)
    _scheduling(a)
    _backends(a)
    _speculation(a)
    _role(a)


def _topology(a: EngineArguments) -> None:
    if a.nnodes * a.nprocs_per_node != a.world_size:
        raise refusal(
            "world_size", a.world_size,
            f"must be --nnodes {a.nnodes} x --nprocs-per-node {a.nprocs_per_node} = {a.nnodes * a.nprocs_per_node}",
            "correct one of the three",
        )  # fmt: skip
    if a.node_rank >= a.nnodes:
        raise refusal("node_rank", a.node_rank, f"must be below --nnodes {a.nnodes}", "nodes count from 0")
    if a.nprocs_per_node % a.attn_tp_size:
        raise refusal(
            "attn_tp_size", a.attn_tp_size, f"must divide --nprocs-per-node {a.nprocs_per_node}",
            "a tensor-parallel group stays on one node",
        )  # fmt: skip


def _parallel_sizes(a: EngineArguments) -> None:
    stage_world = a.attn_tp_size * a.data_parallel_size
    if a.moe_tp_size > 1 and a.expert_parallel_size > 1:
        raise refusal(
            "moe_tp_size", a.moe_tp_size, f"MoE TP and --expert-parallel-size {a.expert_parallel_size} cannot both be above 1",
            "give --moe-tp-size 1",
        )  # fmt: skip
    if a.expert_parallel_size != stage_world or a.moe_tp_size > 1:
        raise refusal(
            "expert_parallel_size", a.expert_parallel_size,
            f"routed experts are spread whole over one stage's {stage_world} ranks (attention TP x DP)",
            f"give --expert-parallel-size {stage_world} --moe-tp-size 1",
        )  # fmt: skip
    if a.dense_tp_size != a.attn_tp_size:
        raise refusal(
            "dense_tp_size", a.dense_tp_size, f"must equal --attn-tp-size {a.attn_tp_size}", "dense MLPs share its group"
        )
    if a.pp_layer_partition:
        if a.pipeline_parallel_size == 1:
            raise refusal("pp_layer_partition", a.pp_layer_partition, "needs --pipeline-parallel-size above 1", "leave it out")
        if len(a.pp_layer_partition) != a.pipeline_parallel_size:
            raise refusal(
                "pp_layer_partition", a.pp_layer_partition,
                f"has {len(a.pp_layer_partition)} entries for --pipeline-parallel-size {a.pipeline_parallel_size}",
                "give one for each stage",
            )  # fmt: skip
        if min(a.pp_layer_partition) < 1:
            raise refusal("pp_layer_partition", a.pp_layer_partition, "each stage needs a layer", "give entries of at least 1")


def _scheduling(a: EngineArguments) -> None:
    if a.max_num_seqs < a.data_parallel_size or a.max_num_seqs % a.data_parallel_size:
        raise refusal(
            "max_num_seqs", a.max_num_seqs, f"is shared by --data-parallel-size {a.data_parallel_size} replicas evenly",
            "give a multiple of it",
        )  # fmt: skip
    if a.cudagraph_capture_sizes:
        _capture_sizes(a, a.cudagraph_capture_sizes)


def _capture_sizes(a: EngineArguments, sizes: tuple[int, ...]) -> None:
    if min(sizes) < 1:
        raise refusal("cudagraph_capture_sizes", sizes, "a batch has at least one request", "give sizes from 1 on")
    if a.disaggregation_mode == "decode" and max(sizes) < a.replica_seqs and not a.enforce_eager:
        raise refusal(
            "cudagraph_capture_sizes", sizes,
            f"a replica has up to {a.replica_seqs} requests, and more than {max(sizes)} of them would make all ranks run eager",
            f"add {a.replica_seqs}, or give --enforce-eager",
        )  # fmt: skip


def _backends(a: EngineArguments) -> None:
    for field in ("attention_backend", "drafter_attention_backend"):
        if getattr(a, field) == "tokenspeed_mla":
            raise refusal(field, "tokenspeed_mla", "uses Blackwell instructions", "on H100 and H200 use flashmla")
        if getattr(a, field) == "flashmla" and "float32" in (a.compute_dtype, a.cache_dtype):
            raise refusal(
                field,
                "flashmla",
                "has bfloat16 target and draft caches only",
                "give both --dtype and --kv-cache-dtype bfloat16",
            )
    if a.moe_backend in ("wgmma", "marlin") and a.compute_dtype != "bfloat16":
        raise refusal("moe_backend", a.moe_backend, "takes bfloat16 activations only", "give --dtype bfloat16")
    if a.all2all_backend == "deepep" and a.compute_dtype != "bfloat16":
        raise refusal("all2all_backend", "deepep", "carries bfloat16 rows only", "give --dtype bfloat16, or gloo")
    if a.all2all_backend == "deepep" and a.moe_backend == "reference":
        raise refusal(
            "all2all_backend",
            "deepep",
            "needs experts whose rows the device counts, not --moe-backend reference",
            "give auto, wgmma or marlin",
        )
    if a.deepep_mode == "low_latency" and a.disaggregation_mode == "prefill":
        raise refusal("deepep_mode", "low_latency", "a prefill engine runs extend-shaped work", "give normal or auto")
    if a.deepep_mode == "normal" and a.disaggregation_mode == "decode" and not a.enforce_eager:
        raise refusal("deepep_mode", "normal", "decode rounds of fixed shape use low latency", "give auto, or --enforce-eager")


def _speculation(a: EngineArguments) -> None:
    if a.speculative_algorithm is None:
        for field in ("speculative_num_draft_tokens", "speculative_draft_model_path"):
            if getattr(a, field) is not None:
                raise refusal(field, getattr(a, field), "needs a drafter", "give --speculative-algorithm, or leave it out")
    elif a.speculative_algorithm == "DSPARK" and a.speculative_draft_model_path is None:
        raise refusal(
            "speculative_algorithm", "DSPARK", "K3 has its DSpark drafter in a checkpoint of its own",
            "give --speculative-draft-model-path",
        )  # fmt: skip
    if a.speculative_algorithm == "MTP" and a.speculative_num_draft_tokens is None:
        raise refusal(
            "speculative_algorithm", "MTP", "a NextN layer drafts any number of tokens, so its checkpoint names no width",
            "give --speculative-num-draft-tokens",
        )  # fmt: skip


def _role(a: EngineArguments) -> None:
    if a.disaggregation_mode == "prefill":
        if a.data_parallel_size > 1:
            raise refusal("data_parallel_size", a.data_parallel_size, "a prefill engine is one replica", "give 1")
        return
    if a.pipeline_parallel_size > 1:
        raise refusal(
            "pipeline_parallel_size", a.pipeline_parallel_size, "needs --disaggregation-mode prefill", "give 1 on decode"
        )
    if a.mm_encoder_tp_mode == "data":
        raise refusal("mm_encoder_tp_mode", "data", "a decode engine runs no encoder", "leave it out on decode")


def check_rank(a: EngineArguments, rank: int) -> None:
    if rank >= a.world_size:
        raise refusal("rank", rank, f"must be below --world-size {a.world_size}", "ranks count from 0")


def check_model(a: EngineArguments, model: ModelConfig) -> None:
    """Whether the model can be cut into this topology and holds this context."""
    partition = a.pp_layer_partition
    if partition and sum(partition) != model.num_hidden_layers:
        raise refusal(
            "pp_layer_partition", partition,
            f"sums to {sum(partition)}, the model has {model.num_hidden_layers} target layers", "draft layers do not count",
        )  # fmt: skip
    for what, count in (
        ("attention heads", model.num_attention_heads),
        ("KDA heads", model.kda_num_heads),
        ("dense MLP columns", model.intermediate_size),
        ("shared expert columns", model.shared_intermediate_size),
        ("vocabulary entries", model.vocab_size),
    ):
        if count % a.attn_tp_size:
            raise refusal("attn_tp_size", a.attn_tp_size, f"must divide the model's {count} {what}", "give a divisor")
    if model.num_experts % a.expert_parallel_size:
        raise refusal(
            "expert_parallel_size",
            a.expert_parallel_size,
            f"must divide the model's {model.num_experts} experts",
            "give a divisor",
        )
    if a.max_model_len > model.max_position_embeddings:
        raise refusal(
            "max_model_len", a.max_model_len, f"the model's positions end at {model.max_position_embeddings}", "lower it"
        )


def wants_gpu(a: EngineArguments) -> bool:
    """Whether it is asked to run on GPUs, by --device or by a backend that runs on them alone."""
    return a.device == "cuda" or any(getattr(a, field) in backends for field, (backends, _) in GPU_BACKENDS.items())


def runs_on_gpu(a: EngineArguments, cuda: bool) -> bool:
    """Whether it runs on GPUs on a machine that has some or has none."""
    return wants_gpu(a) or (cuda and a.device == "auto")


def check_runnable(a: EngineArguments, cuda: bool) -> None:
    """Whether this version can run it on this kind of machine. ConfigError before any process starts."""
    if a.device == "cuda" and not cuda:
        raise refusal("device", "cuda", "this machine has no NVIDIA GPU", "give cpu or auto")
    for field, (backends, instead) in GPU_BACKENDS.items():
        backend = getattr(a, field)
        if backend not in backends:
            continue
        if not cuda:
            raise refusal(field, backend, "needs an NVIDIA GPU, and this machine has none", f"on a CPU host use {instead}")
        if a.device == "cpu":
            raise refusal(field, backend, "needs an NVIDIA GPU, and --device is cpu", f"use {instead}, or --device cuda")


def check_files(a: EngineArguments) -> None:
    """Whether --model is a checkpoint directory, and the drafter's is one."""
    for field in ("model", "speculative_draft_model_path"):
        if getattr(a, field) is None:
            continue
        folder = Path(getattr(a, field))
        if not folder.is_dir():
            raise refusal(
                field, folder, "no such directory", "give a checkpoint directory; `k3mesh make-checkpoint` writes a tiny one"
            )
        if not any(folder.glob("*.safetensors")):
            raise refusal(field, folder, "has no safetensors file", "give a complete checkpoint directory")


def check_pair(prefill: EngineArguments, decode: EngineArguments) -> None:
    """What must be equal on both engines, or no cache can be handed over."""
    for field in ("model", "served_model_name", "compute_dtype", "cache_dtype", "attn_tp_size", "max_model_len"):
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            name = {"compute_dtype": "dtype", "cache_dtype": "kv_cache_dtype"}.get(field, field)
            raise refusal(name, ours, f"must be the same on both engines, decode has {theirs}", "give both the same")
    if prefill.verify_width != decode.verify_width or prefill.speculative_algorithm != decode.speculative_algorithm:
        raise ConfigError(
            f"{flag('speculative_algorithm')} {prefill.speculative_algorithm}: algorithm and verify width must be the same on "
            "both engines; give both the same --speculative flags",
            param="speculative_algorithm",
        )


def notes(a: EngineArguments) -> list[str]:
    """What is legal but worth a line in the log."""
    lines: list[str] = []
    needed = -(-a.replica_seqs * a.verify_width // a.attn_tp_size)
    if a.disaggregation_mode == "decode" and a.low_latency_max_num_tokens_per_gpu < needed:
        lines.append(
            f"--low-latency-max-num-tokens-per-gpu {a.low_latency_max_num_tokens_per_gpu}: a full round has {needed} rows for "
            f"each rank and would be refused; give at least {needed}"
        )
    if a.disaggregation_mode == "decode" and a.enforce_eager:
        lines.append("--enforce-eager: decode without graphs is a diagnostic, not a deployment")
    if a.disaggregation_mode == "prefill" and a.retraction_snapshot_ratio is not None:
        lines.append("--retraction-snapshot-ratio: a prefill engine never retracts; no pool is made")
    return lines
