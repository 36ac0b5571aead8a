"""Random drafters in their released layouts (spec speculation §1, §2, §11): a k3_dspark checkpoint of its own, or the NextN
layer of a target checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from services.contracts.draft import DraftConfig
from services.contracts.model import ModelConfig
from services.launch.checkpoint_tensors import TensorSpec, linear, mix_query, mla, moe, norm

K3_LAYERS = 93
K3_DSPARK = {
    "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "markov_rank": 256,
}  # fmt: skip
TINY_DSPARK = {
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8, "q_lora_rank": 40, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "markov_rank": 16,
}  # fmt: skip
PRESETS = {"tiny": TINY_DSPARK, "k3": K3_DSPARK, "slim": {**K3_DSPARK, "num_hidden_layers": 2}}
MASK_FROM_END = 3  # the mask token's place before the vocabulary's end


def default_taps(layers: int) -> list[int]:
    """The published ones for K3's depth; else three over the depth."""
    return [2, 23, 47, 71, 89] if layers == K3_LAYERS else sorted({layers // 4, layers // 2, max(0, layers - 2)})


def dspark_config(
    target: ModelConfig, preset: str, taps: list[int], stream: str, fc_norm: bool, block_size: int | None
) -> dict[str, Any]:
    """config.json of a drafter for this target."""
    config: dict[str, Any] = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        **PRESETS[preset],
        "num_key_value_heads": PRESETS[preset]["num_attention_heads"],
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "rope_theta": 50000.0,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": len(taps),
        "target_layer_ids": taps,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "aux_hidden_stream": stream,
        "fc_norm": fc_norm,
        "mask_token_id": target.vocab_size - MASK_FROM_END,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    return config if block_size is None else config | {"block_size": block_size}


def dspark_specs(draft: DraftConfig, embedding: TensorSpec) -> Iterator[TensorSpec]:
    """All tensors; the embedding has the bytes of the target's, whose spec is given."""
    d, heads, taps = draft.hidden_size, draft.num_attention_heads, len(draft.target_layer_ids)
    yield replace(embedding, name="embed_tokens.weight", key=embedding.name)
    for tap in range(taps if draft.fc_norm else 0):
        yield norm(f"fc_norm.{tap}.weight", d)
    yield linear("context_proj", d, taps * d)
    yield norm("context_norm.weight", d)
    for layer in range(draft.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield norm(f"{prefix}input_layernorm.weight", d)
        yield linear(f"{prefix}self_attn.q_a_proj", draft.q_lora_rank, d)
        yield norm(f"{prefix}self_attn.q_a_layernorm.weight", draft.q_lora_rank)
        yield linear(f"{prefix}self_attn.q_b_proj", heads * draft.qk_head_dim, draft.q_lora_rank, gain=1.5)
        yield linear(f"{prefix}self_attn.kv_a_proj_with_mqa", draft.mla_row, d)
        yield norm(f"{prefix}self_attn.kv_a_layernorm.weight", draft.kv_lora_rank)
        width = heads * (draft.qk_nope_head_dim + draft.v_head_dim)
        yield linear(f"{prefix}self_attn.kv_b_proj", width, draft.kv_lora_rank, gain=1.5)
        yield linear(f"{prefix}self_attn.o_proj", d, heads * draft.v_head_dim)
        yield norm(f"{prefix}post_attention_layernorm.weight", d)
        yield linear(f"{prefix}mlp.gate_proj", draft.intermediate_size, d, gain=2)
        yield linear(f"{prefix}mlp.up_proj", draft.intermediate_size, d, gain=2)
        yield linear(f"{prefix}mlp.down_proj", d, draft.intermediate_size)
    yield norm("final_norm.weight", d)
    markov = (draft.vocab_size, draft.markov_rank)
    yield TensorSpec("markov_head.markov_w1.weight", "BF16", markov, std=1.0)
    yield TensorSpec("markov_head.markov_w2.weight", "BF16", markov, std=1 / sqrt(draft.markov_rank))
    yield linear("confidence_head.proj", 1, d + draft.markov_rank)
    yield TensorSpec("confidence_head.proj.bias", "BF16", (1,), std=0.1)


def nextn_specs(target: ModelConfig, embedding: TensorSpec, head: TensorSpec) -> Iterator[TensorSpec]:
    """The layer behind the target's last; embedding and head have the bytes of the target's."""
    h, prefix = target.hidden_size, f"language_model.model.layers.{target.num_hidden_layers}."
    yield replace(embedding, name=f"{prefix}embed_tokens.weight", key=embedding.name)
    yield norm(f"{prefix}enorm.weight", h)
    yield norm(f"{prefix}hnorm.weight", h)
    yield linear(f"{prefix}eh_proj", h, 2 * h)
    for which in ("self_attention", "mlp"):  # shipped and inert: the mixture would have one candidate
        yield norm(f"{prefix}{which}_res_norm.weight", h)
        yield mix_query(f"{prefix}{which}_res_proj.weight", h)
    yield norm(f"{prefix}input_layernorm.weight", h)
    yield from mla(target, f"{prefix}self_attn.")
    yield norm(f"{prefix}post_attention_layernorm.weight", h)
    yield from moe(target, f"{prefix}block_sparse_moe.")
    yield norm(f"{prefix}shared_head.norm.weight", h)
    yield replace(head, name=f"{prefix}shared_head.head.weight", key=head.name)


def with_nextn(config: Mapping[str, Any]) -> dict[str, Any]:
    """A target's config.json that says it has the layer."""
    return {**config, "text_config": {**config["text_config"], "num_nextn_predict_layers": 1}}
