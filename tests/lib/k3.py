"""The full K3 shape, as a configuration without a checkpoint."""

from services.contracts.model import ModelConfig, parse_model_config

MLA_LAYERS = (*range(3, 92, 4), 92)  # 0-based
CONFIG = {
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 33792,
    "first_k_dense_replace": 1, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "attn_res_block_size": 12,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "full_attn_layers": [layer + 1 for layer in MLA_LAYERS],
        "kda_layers": [layer + 1 for layer in range(93) if layer not in MLA_LAYERS],
    },
}  # fmt: skip


def k3_model() -> ModelConfig:
    return parse_model_config(CONFIG, "K3")
