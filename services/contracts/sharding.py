"""Which part of which released tensor a rank holds, and under which name (spec k3-model §10, §11). Pure: no torch.

A rank's weights are `Target`s, put together from `Source`s: contiguous ranges of one dimension of released tensors. Matrices
that read the same input are fused into one target, rows below rows. Names drop the prefix `language_model.`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from k3mesh.errors import ConfigError
from services.contracts.model import ModelConfig
from services.contracts.topology import RankPlace, Topology

PREFIX = "language_model."
MODEL, FLOAT32, PACKED = "model", "float32", "uint8"  # dtype of a target; MODEL is what --dtype says
MXFP4_GROUP = 32
NEXTN_NORMS = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")


@dataclass(frozen=True, slots=True)
class Source:
    """Range [start, stop) of dimension `dim` of one released tensor."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    start: int
    stop: int
    padded: bool = False  # any shape of at least as many elements will do: it is flattened, the rest is padding
    expert: int | None = None  # index in a stack of experts

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the range."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor in the rank's memory: its sources one below the other (within an expert, for a stack)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Member `rank` of `size` takes an equal part."""

    rank: int
    size: int

    def range_of(self, extent: int) -> tuple[int, int]:
        part = extent // self.size
        return self.rank * part, (self.rank + 1) * part


ALL = Share(0, 1)


def stage_targets(model: ModelConfig, topology: Topology, place: RankPlace) -> list[Target]:
    """Everything that the rank at `place` loads. ConfigError if a dimension does not divide by its group."""
    check_divisible(model, topology)
    tp = Share(place.tp, topology.tp_size)
    ep = Share(place.dp * topology.tp_size + place.tp, topology.ep_size)
    targets: list[Target] = []
    if place.stage == 0:
        targets.append(rows("model.embed_tokens.weight", (model.vocab_size, model.hidden_size), tp))
    for layer in place.window:
        targets += _layer(model, layer, tp, ep)
    if place.stage == topology.last_stage:
        targets += _mixer(model, "model.output_attn_res")
        targets.append(norm("model.norm.weight", model.hidden_size))
        targets.append(rows("lm_head.weight", (model.vocab_size, model.hidden_size), tp))
    return targets


def nextn_targets(model: ModelConfig, topology: Topology, place: RankPlace, embedding: bool) -> list[Target]:
    """The NextN layer, which stands behind the decoder's layers and is an MLA and MoE layer without attention residuals
    (spec speculation §11). `embedding`: with this rank's shard of its own embedding."""
    check_divisible(model, topology)
    tp, h = Share(place.tp, topology.tp_size), model.hidden_size
    ep = Share(place.dp * topology.tp_size + place.tp, topology.ep_size)
    name = f"model.layers.{model.num_hidden_layers}"
    targets = [norm(f"{name}.{which}.weight", h) for which in NEXTN_NORMS]
    targets.append(rows(f"{name}.eh_proj.weight", (h, 2 * h), ALL))
    targets += [*_mla(model, f"{name}.self_attn", tp), *_moe(model, f"{name}.block_sparse_moe", tp, ep)]
    if embedding:
        targets.append(rows(f"{name}.embed_tokens.weight", (model.vocab_size, h), tp))
    return targets


def check_divisible(model: ModelConfig, topology: Topology) -> None:
    """ConfigError for the first dimension that its group cannot share equally."""
    for what, extent, size, flag in (
        ("num_attention_heads", model.num_attention_heads, topology.tp_size, "--attn-tp-size"),
        ("linear_attn_config.num_heads", model.kda_num_heads, topology.tp_size, "--attn-tp-size"),
        ("intermediate_size", model.intermediate_size, topology.tp_size, "--dense-tp-size"),
        ("num_shared_experts * moe_intermediate_size", model.shared_intermediate_size, topology.tp_size, "--dense-tp-size"),
        ("hidden_size", model.hidden_size, topology.tp_size, "--attn-tp-size"),
        ("vocab_size", model.vocab_size, topology.tp_size, "--attn-tp-size"),
        ("num_experts", model.num_experts, topology.ep_size, "--expert-parallel-size"),
    ):
        if extent % size:
            raise ConfigError(
                f"{flag} {size}: {what} = {extent} must be a multiple of it; choose a size that divides {extent}",
                param=flag.removeprefix("--").replace("-", "_"),
            )


def _layer(model: ModelConfig, layer: int, tp: Share, ep: Share) -> Iterator[Target]:
    name = f"model.layers.{layer}"
    yield norm(f"{name}.input_layernorm.weight", model.hidden_size)
    yield norm(f"{name}.post_attention_layernorm.weight", model.hidden_size)
    yield from _mixer(model, f"{name}.self_attention_res")
    yield from _mixer(model, f"{name}.mlp_res")
    yield from _mla(model, f"{name}.self_attn", tp) if model.is_mla(layer) else _kda(model, f"{name}.self_attn", tp)
    if model.is_dense(layer):
        yield from _mlp(f"{name}.mlp", model.hidden_size, model.intermediate_size, tp)
    else:
        yield from _moe(model, f"{name}.block_sparse_moe", tp, ep)


def _mixer(model: ModelConfig, name: str) -> Iterator[Target]:
    yield norm(f"{name}_norm.weight", model.hidden_size)
    query = Source(f"{name}_proj.weight", (1, model.hidden_size), 0, 0, 1)
    yield Target(query.tensor, (model.hidden_size,), FLOAT32, (query,))


def _kda(model: ModelConfig, name: str, tp: Share) -> Iterator[Target]:
    h, heads, dim = model.hidden_size, model.kda_num_heads, model.kda_head_dim
    channels = heads * dim
    yield fused(
        f"{name}.in_proj.weight",  # q | k | v | output gate | decay, low rank | beta
        [source(f"{name}.{which}_proj.weight", (channels, h), 0, tp) for which in ("q", "k", "v", "g")]
        + [source(f"{name}.f_a_proj.weight", (dim, h), 0, ALL), source(f"{name}.b_proj.weight", (heads, h), 0, tp)],
    )
    convs = [source(f"{name}.{which}_conv1d.weight", (channels, 1, model.conv_kernel_size), 0, tp) for which in "qkv"]
    local = channels // tp.size
    yield Target(f"{name}.conv1d.weight", (3 * local, model.conv_kernel_size), FLOAT32, tuple(convs))
    yield rows(f"{name}.f_b_proj.weight", (channels, dim), tp)
    start, stop = tp.range_of(heads)
    yield Target(f"{name}.A_log", (stop - start,), FLOAT32, (Source(f"{name}.A_log", (heads,), 0, start, stop, padded=True),))
    yield Target(f"{name}.dt_bias", (heads // tp.size, dim), FLOAT32, (source(f"{name}.dt_bias", (channels,), 0, tp),))
    yield norm(f"{name}.o_norm.weight", dim)
    yield columns(f"{name}.o_proj.weight", (h, channels), tp)


def _mla(model: ModelConfig, name: str, tp: Share) -> Iterator[Target]:
    h, heads, values = model.hidden_size, model.num_attention_heads, model.num_attention_heads * model.v_head_dim
    yield fused(
        f"{name}.in_proj.weight",  # query, low rank | cached row | output gate
        [
            source(f"{name}.q_a_proj.weight", (model.q_lora_rank, h), 0, ALL),
            source(f"{name}.kv_a_proj_with_mqa.weight", (model.mla_row, h), 0, ALL),
            source(f"{name}.g_proj.weight", (values, h), 0, tp),
        ],
    )
    yield norm(f"{name}.q_a_layernorm.weight", model.q_lora_rank)
    yield norm(f"{name}.kv_a_layernorm.weight", model.kv_lora_rank)
    yield rows(f"{name}.q_b_proj.weight", (heads * model.qk_head_dim, model.q_lora_rank), tp)
    yield rows(f"{name}.kv_b_proj.weight", (heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank), tp)
    yield columns(f"{name}.o_proj.weight", (h, values), tp)


def _mlp(name: str, width: int, inner: int, tp: Share) -> Iterator[Target]:
    yield fused(
        f"{name}.gate_up_proj.weight",
        [source(f"{name}.{which}_proj.weight", (inner, width), 0, tp) for which in ("gate", "up")],
    )
    yield columns(f"{name}.down_proj.weight", (width, inner), tp)


def _moe(model: ModelConfig, name: str, tp: Share, ep: Share) -> Iterator[Target]:
    h, latent = model.hidden_size, model.routed_expert_hidden_size
    yield rows(f"{name}.gate.weight", (model.num_experts, h), ALL)
    yield norm(f"{name}.gate.e_score_correction_bias", model.num_experts)
    yield rows(f"{name}.routed_expert_down_proj.weight", (latent, h), ALL)
    yield rows(f"{name}.routed_expert_up_proj.weight", (h, latent), tp)  # output columns: summed in with the shared partial
    yield norm(f"{name}.routed_expert_norm.weight", latent)
    yield from _mlp(f"{name}.shared_experts", h, model.shared_intermediate_size, tp)
    yield from _experts(f"{name}.experts", latent, model.moe_intermediate_size, range(*ep.range_of(model.num_experts)))


def _experts(name: str, latent: int, inner: int, local: range) -> Iterator[Target]:
    """The stacks w13 (gate rows, then up rows) and w2, each packed and with its scales."""
    for stack, parts, out, width in (("w13", ("w1", "w3"), inner, latent), ("w2", ("w2",), latent, inner)):
        for kind, columns in (("weight_packed", width // 2), ("weight_scale", width // MXFP4_GROUP)):
            sources = tuple(
                Source(f"{name}.{expert}.{part}.{kind}", (out, columns), 0, 0, out, expert=expert - local.start)
                for expert in local
                for part in parts
            )
            yield Target(f"{name}.{stack}.{kind}", (len(local), len(parts) * out, columns), PACKED, sources)


def source(tensor: str, shape: tuple[int, ...], dim: int, share: Share) -> Source:
    start, stop = share.range_of(shape[dim])
    return Source(tensor, shape, dim, start, stop)


def fused(name: str, sources: list[Source]) -> Target:
    return Target(name, (sum(s.part[0] for s in sources), *sources[0].part[1:]), MODEL, tuple(sources))


def rows(name: str, shape: tuple[int, ...], share: Share) -> Target:
    return fused(name, [source(name, shape, 0, share)])


def columns(name: str, shape: tuple[int, int], share: Share) -> Target:
    return fused(name, [source(name, shape, 1, share)])


def norm(name: str, width: int) -> Target:
    """A vector that enters float32 maths."""
    return Target(name, (width,), FLOAT32, (Source(name, (width,), 0, 0, width),))
