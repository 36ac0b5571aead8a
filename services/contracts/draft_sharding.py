"""Which tensors of a DSpark drafter's checkpoint a rank holds (spec speculation §2); a NextN layer's are in sharding."""

from dataclasses import dataclass

from k3mesh.errors import ConfigError
from services.contracts.draft import DraftConfig, taps_in
from services.contracts.sharding import ALL, Share, Source, Target, columns, fused, norm, rows, source
from services.contracts.topology import RankPlace, Topology

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DraftPart:
    """What of the drafter the rank at a place holds: its stage's taps; on the last stage the network, and the embedding
    where the target's lives on another stage."""

    taps: tuple[int, ...]
    network: bool
    embedding: bool

    @classmethod
    def of(cls, draft: DraftConfig, topology: Topology, place: RankPlace) -> "DraftPart":
        taps = taps_in(draft.taps(topology.num_layers), place.window)
        last = place.stage == topology.last_stage
        return cls(tuple(tap.index for tap in taps), last, last and place.stage > 0)


def dspark_targets(draft: DraftConfig, part: DraftPart, tp: Share) -> list[Target]:
    """Everything of a DSpark drafter that a rank loads. ConfigError (DRAFT_UNSUPPORTED) if a dimension does not divide."""
    _check_divisible(draft, tp)
    width = draft.hidden_size
    targets: list[Target] = []
    for tap in part.taps:
        if draft.fc_norm:
            targets.append(norm(f"fc_norm.{tap}.weight", width))
        whole = (width, len(draft.target_layer_ids) * width)
        segment = Source("context_proj.weight", whole, 1, tap * width, (tap + 1) * width)
        targets.append(fused(f"context_proj.{tap}", [segment]))
    if part.embedding:
        targets.append(rows(EMBEDDING, (draft.vocab_size, width), tp))
    if part.network:
        targets += _network(draft, tp)
    return targets


def _network(draft: DraftConfig, tp: Share) -> list[Target]:
    d, heads, inner = draft.hidden_size, draft.num_attention_heads, draft.intermediate_size
    layers = [f"layers.{n}" for n in range(draft.num_hidden_layers)]
    context = [source(f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (draft.mla_row, d), 0, ALL) for layer in layers]
    targets = [fused("kv_a_proj.weight", context), norm("context_norm.weight", d), norm("final_norm.weight", d)]
    for layer in layers:
        name = f"{layer}.self_attn"
        targets += [
            norm(f"{layer}.input_layernorm.weight", d),
            norm(f"{layer}.post_attention_layernorm.weight", d),
            rows(f"{name}.q_a_proj.weight", (draft.q_lora_rank, d), ALL),
            norm(f"{name}.q_a_layernorm.weight", draft.q_lora_rank),
            norm(f"{name}.kv_a_layernorm.weight", draft.kv_lora_rank),
            rows(f"{name}.q_b_proj.weight", (heads * draft.qk_head_dim, draft.q_lora_rank), tp),
            rows(f"{name}.kv_b_proj.weight", (heads * (draft.qk_nope_head_dim + draft.v_head_dim), draft.kv_lora_rank), tp),
            columns(f"{name}.o_proj.weight", (d, heads * draft.v_head_dim), tp),
            fused(
                f"{layer}.mlp.gate_up_proj.weight",
                [source(f"{layer}.mlp.{which}_proj.weight", (inner, d), 0, tp) for which in ("gate", "up")],
            ),
            columns(f"{layer}.mlp.down_proj.weight", (d, inner), tp),
        ]
    targets.append(rows("markov_head.markov_w1.weight", (draft.vocab_size, draft.markov_rank), ALL))
    targets.append(rows("markov_head.markov_w2.weight", (draft.vocab_size, draft.markov_rank), tp))
    return targets


def _check_divisible(draft: DraftConfig, tp: Share) -> None:
    for key in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(draft, key) % tp.size:
            raise ConfigError(
                f"--attn-tp-size {tp.size}: the drafter's {key} = {getattr(draft, key)} must be a multiple of it",
                detail="DRAFT_UNSUPPORTED",
                param="attn_tp_size",
            )
