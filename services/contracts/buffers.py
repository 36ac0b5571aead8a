"""Bytes that a rank needs besides weights and cache: expert buffers, what a step or a round works in, graphs, processes.

Formulas are those of the specifications, by what is said beside them. What no formula gives (libraries, graphs, processes) is
an allowance, in capitals; measurements on the machine replace it.
"""

from dataclasses import dataclass

from services.contracts.arguments import (
    CUDA_FRAME_BYTES,
    CUDA_FRAMES,
    HOST_FRAME_BYTES,
    HOST_FRAMES,
    EngineArguments,
)
from services.contracts.draft import DraftConfig, NextNConfig
from services.contracts.geometry import ITEM_BYTES, verify_widths
from services.contracts.model import ModelConfig
from services.contracts.topology import RankPlace, Topology

MIB, GIB = 1 << 20, 1 << 30
CUDA_LIBRARIES = 2 * GIB  # contexts of worker and agent, NCCL's channels, kernels
GRAPH = 48 * MIB  # one captured round: about 93 layers x 30 nodes, and its workspaces
HEAP_STEP, EXPERT_WORKSPACE = 512 * MIB, 32 * MIB  # NVSHMEM's granularity, DeepEP's workspace (spec moe-ep §7)
WORKER_PROCESS, AGENT_PROCESS, SERVICE_PROCESS = 400 * MIB, 120 * MIB, 100 * MIB  # on a host: code, libraries, heap
KERNEL_HIDDEN, KERNEL_TOP_K = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192), 11  # of released low-latency kernels
MARLIN_BLOCK = 16  # rows (spec moe-ep §4)
CHANNELS = 10  # of DeepEP's normal mode: half of its 20 SMs
ALIVE_AT_ONCE = 2  # low-latency results that may be alive

Draft = DraftConfig | NextNConfig | None


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a rank's memory."""

    name: str
    bytes: int


def aligned(value: int, to: int) -> int:
    return -(-value // to) * to


# ---- expert buffers (spec moe-ep §2, §7)
def low_latency_hidden(model: ModelConfig) -> tuple[int, int]:
    """(row width, passes) with the released low-latency kernels: as it is where they have this width and top-k, else padded to
    the next width that they have, with the routes in two halves."""
    latent, top_k = model.routed_expert_hidden_size, model.num_experts_per_token
    if latent in KERNEL_HIDDEN and top_k <= KERNEL_TOP_K:
        return latent, 1
    return min((hidden for hidden in KERNEL_HIDDEN if hidden >= latent), default=latent), 2


def low_latency_bytes(capacity: int, hidden: int, experts: int) -> int:
    """DeepEP's low-latency buffer for `capacity` source rows a rank."""
    dispatch = 16 + max(2 * hidden, hidden + 4 * hidden // 128)
    combine = 4 * hidden // 128 + 2 * hidden
    send = max(capacity * dispatch, experts * capacity * combine)
    receive = max(experts * capacity * dispatch, experts * capacity * combine)
    return aligned(2 * send + 2 * receive + 2 * aligned(4 * experts, 128), 128) + 128


def normal_bytes(hidden: int, ranks: int) -> tuple[int, int]:
    """(NVLink, RDMA) bytes of DeepEP's normal mode over `ranks` ranks of 8 to a node."""
    nodes = -(-ranks // 8)
    tokens, sent = (256, 0) if nodes == 1 else (288, 128)  # rows on their way in one channel
    row = 2 * hidden + 8 + 128 * 8 + 128 * 4 + 128 * 4  # with its source, ids, weights and scales
    nvlink = CHANNELS * min(ranks, 8) * ((2 * nodes + 3) * 4 + tokens * row)
    rdma = CHANNELS * nodes * (18 * 2 * 4 + sent * 2 * (row + 16)) if nodes > 1 else 0
    return aligned(nvlink, 128), aligned(rdma, 128)


def expert_buffers(a: EngineArguments, model: ModelConfig, topology: Topology) -> list[Part]:
    nvlink, rdma = normal_bytes(model.routed_expert_hidden_size, topology.ep_size)
    if topology.role == "prefill":
        return [Part("expert buffers, normal mode", nvlink + EXPERT_WORKSPACE)]
    hidden, passes = low_latency_hidden(model)
    capacity = a.low_latency_max_num_tokens_per_gpu
    heap = max(rdma, low_latency_bytes(capacity, hidden, model.num_experts))
    received = model.num_experts // topology.ep_size * topology.ep_size * capacity * hidden * 2
    return [
        Part("expert buffers, normal mode", nvlink + EXPERT_WORKSPACE),
        Part("expert buffers, low latency", aligned(heap, HEAP_STEP)),
        Part("expert rows received", min(passes, ALIVE_AT_ONCE) * received),
    ]


# ---- a prefill step (spec moe-ep §3, k3-model §2)
def _step(a: EngineArguments, model: ModelConfig, topology: Topology, place: RankPlace, draft: Draft) -> list[Part]:
    rows, item = a.chunked_prefill_size, ITEM_BYTES[a.compute_dtype]
    hidden, latent, inner = model.hidden_size, model.routed_expert_hidden_size, model.moe_intermediate_size
    gathered = rows  # a rank may be sent a row by each of the stage's ranks: all of the batch
    routed = gathered * model.num_experts_per_token * (2 * inner + inner + latent) * item
    context = 4 * draft.hidden_size if isinstance(draft, DraftConfig) else 0
    closed = model.closed_blocks_before(place.window.stop)
    wide = max(
        4 * model.kda_num_heads * model.kda_head_dim + model.hidden_size,
        model.num_attention_heads * (model.mla_row + model.kv_lora_rank + model.v_head_dim),
        2 * (model.intermediate_size if place.window.start < model.first_k_dense_replace else model.shared_intermediate_size),
    )
    stream = rows * hidden * item * (1 + closed + 3)  # prefix, closed blocks, and three of a layer's own
    before, behind = (
        0 if place.stage == edge else rows * (hidden * item * (1 + model.closed_blocks_before(layer)) + context)
        for edge, layer in ((0, place.window.start), (topology.last_stage, place.window.stop))
    )
    logits = a.max_num_seqs * model.vocab_size * 4 if place.stage == topology.last_stage else 0
    return [
        Part("experts' work space", routed + 2 * gathered * latent * item),
        Part("activations of a step", stream + rows * wide // topology.tp_size * item + logits),
        Part("between stages", before + behind),
    ]


# ---- a decode round (spec moe-ep §4, speculation §8)
def compact_rows(unique: int, top_k: int, local: int, capacity_rows: int) -> int:
    """Rows that the low-latency experts' work space is made for."""
    routes = min(unique * min(top_k, local), local * capacity_rows)
    return aligned(routes + local * (MARLIN_BLOCK - 1), MARLIN_BLOCK)


def replay_row_bytes(model: ModelConfig, tp: int, item: int) -> int:
    """What one verified row of one KDA layer leaves until it is known whether it counts (speculation §8, scheme B)."""
    heads, dim = model.kda_num_heads // tp, model.kda_head_dim
    return (3 * heads * dim + dim + heads) * item + heads * dim * 4


def _round(a: EngineArguments, model: ModelConfig, topology: Topology, draft: Draft, gpu: bool) -> list[Part]:
    rows, item = a.replica_seqs * a.verify_width, ITEM_BYTES[a.compute_dtype]
    local = model.num_experts // topology.ep_size
    capacity_rows = topology.ep_size * a.low_latency_max_num_tokens_per_gpu
    compact = compact_rows(rows * topology.dp_size, model.num_experts_per_token, local, capacity_rows)
    latent, inner = model.routed_expert_hidden_size, model.moe_intermediate_size
    kda = len([layer for layer in range(model.num_hidden_layers) if not model.is_mla(layer)])
    wide = max(2 * model.intermediate_size, 4 * model.kda_num_heads * model.kda_head_dim) // topology.tp_size
    blocks = 2 + model.closed_blocks_before(model.num_hidden_layers)
    parts = [
        Part("experts' work space", compact * (2 * latent + 2 * inner + inner) * item),
        Part("activations of a round", rows * ((blocks + 3) * model.hidden_size + wide) * item),
        Part("logits", 2 * rows * model.vocab_size * 4),
    ]
    if draft is not None:
        conv = 3 * model.kda_num_heads // topology.tp_size * model.kda_head_dim * (model.conv_kernel_size - 1) * item
        replay = kda * (rows * replay_row_bytes(model, topology.tp_size, item) + a.replica_seqs * conv)
        parts.append(Part("KDA rows to replay", replay))
    if gpu and a.captures_graphs:
        parts.append(Part("graphs", graph_bytes(a)))
    return parts


def graph_bytes(a: EngineArguments) -> int:
    """What captured rounds hold beside what they compute in."""
    return len(a.buckets()) * len(verify_widths(a.verify_width)) * GRAPH


def staging_bytes() -> int:
    """Of a GPU's transfer agent."""
    return CUDA_FRAMES * CUDA_FRAME_BYTES


def working_parts(
    a: EngineArguments, model: ModelConfig, topology: Topology, place: RankPlace, draft: Draft, gpu: bool
) -> list[Part]:
    """Everything of one rank that is neither weights nor cache. On a host the experts' rows go by the process' own heap."""
    spread = gpu and topology.ep_size > 1 and a.all2all_backend != "gloo"
    parts = expert_buffers(a, model, topology) if spread else []
    parts += _step(a, model, topology, place, draft) if topology.role == "prefill" else _round(a, model, topology, draft, gpu)
    if gpu:
        return [*parts, Part("staging frames", staging_bytes()), Part("libraries", CUDA_LIBRARIES)]
    return [
        *parts,
        Part("experts in float32", dequantized_bytes(model, topology, place)),
        Part("staging frames", HOST_FRAMES * HOST_FRAME_BYTES),
        Part("worker and agent", WORKER_PROCESS + AGENT_PROCESS),
    ]


def dequantized_bytes(model: ModelConfig, topology: Topology, place: RankPlace) -> int:
    """What the reference kernels' experts take more than the packed ones that they replace."""
    layers = sum(not model.is_dense(layer) for layer in place.window)
    values = 3 * model.routed_expert_hidden_size * model.moe_intermediate_size
    return layers * (model.num_experts // topology.ep_size) * (values * 4 - values * 17 // 32)
