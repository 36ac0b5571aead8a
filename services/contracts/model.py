"""The K3 text model's shape, read from config.json's dictionary and checked once (spec k3-model §1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from k3mesh.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """What every part needs to know of the target model. Names follow config.json; layer indices are 0-based."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float
    mla_layers: tuple[int, ...]  # 0-based, ascending
    intermediate_size: int
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    moe_renormalize: bool
    routed_scaling_factor: float
    latent_moe_use_norm: bool
    situ_beta: float
    situ_linear_beta: float
    rms_norm_eps: float
    attn_res_block_size: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    @property
    def mla_row(self) -> int:
        """Elements of one cached MLA row: latent then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace

    def closes_block(self, layer: int) -> bool:
        """The attention residual closes a block inside this layer (spec k3-model §2)."""
        return layer % self.attn_res_block_size == 0

    def closed_blocks_before(self, layer: int) -> int:
        return -(-layer // self.attn_res_block_size)


def parse_model_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Read the text model's shape; ConfigError names the key of `source` (a path, for messages) that is wrong."""
    text = cast(Mapping[str, Any], config.get("text_config", config))

    def need(key: str, kind: type, of: Mapping[str, Any] = text) -> Any:
        if key not in of:
            raise ConfigError(f"{source}: key {key!r} is missing; this is not a Kimi K3 config.json", param=key)
        value = of[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{source}: {key} = {value!r} must be of type {kind.__name__}", param=key)
        return value

    def positive(key: str, of: Mapping[str, Any] = text) -> int:
        value = need(key, int, of)
        if value < 1:
            raise ConfigError(f"{source}: {key} = {value} must be at least 1", param=key)
        return cast(int, value)

    def refuse_unless(key: str, expected: Any) -> None:
        if key in text and text[key] != expected:
            raise ConfigError(f"{source}: {key} = {text[key]!r} is not supported; K3 has {expected!r}", param=key)

    for key, expected in (
        ("hidden_act", "situ"), ("mla_use_nope", True), ("mla_use_output_gate", True), ("tie_word_embeddings", False),
        ("moe_router_activation_func", "sigmoid"), ("topk_method", "noaux_tc"), ("num_expert_group", 1), ("topk_group", 1),
        ("moe_layer_freq", 1),
    ):  # fmt: skip
        refuse_unless(key, expected)

    layers = positive("num_hidden_layers")
    linear = cast(Mapping[str, Any], need("linear_attn_config", dict))
    mla = _mla_layers(linear, layers, source)
    eos: Any = config.get("eos_token_id", text.get("eos_token_id"))
    eos_ids = tuple(cast(list[int], eos)) if isinstance(eos, list) else (() if eos is None else (int(eos),))
    model = ModelConfig(
        vocab_size=positive("vocab_size"),
        hidden_size=positive("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=positive("num_attention_heads"),
        q_lora_rank=positive("q_lora_rank"),
        kv_lora_rank=positive("kv_lora_rank"),
        qk_nope_head_dim=positive("qk_nope_head_dim"),
        qk_rope_head_dim=positive("qk_rope_head_dim"),
        v_head_dim=positive("v_head_dim"),
        kda_num_heads=positive("num_heads", linear),
        kda_head_dim=positive("head_dim", linear),
        conv_kernel_size=positive("short_conv_kernel_size", linear),
        gate_lower_bound=need("gate_lower_bound", float, linear),
        mla_layers=mla,
        intermediate_size=positive("intermediate_size"),
        first_k_dense_replace=need("first_k_dense_replace", int),
        num_experts=positive("num_experts"),
        num_experts_per_token=positive("num_experts_per_token"),
        num_shared_experts=positive("num_shared_experts"),
        moe_intermediate_size=positive("moe_intermediate_size"),
        routed_expert_hidden_size=positive("routed_expert_hidden_size"),
        moe_renormalize=bool(text.get("moe_renormalize", True)),
        routed_scaling_factor=float(text.get("routed_scaling_factor", 1.0)),
        latent_moe_use_norm=bool(text.get("latent_moe_use_norm", True)),
        situ_beta=float(text.get("activation_situ_beta", 4.0)),
        situ_linear_beta=float(text.get("activation_situ_linear_beta", 25.0)),
        rms_norm_eps=need("rms_norm_eps", float),
        attn_res_block_size=positive("attn_res_block_size"),
        max_position_embeddings=positive("max_position_embeddings"),
        bos_token_id=int(config.get("bos_token_id", text.get("bos_token_id", 0))),
        eos_token_ids=eos_ids,
        pad_token_id=int(config.get("pad_token_id", text.get("pad_token_id", 0))),
    )
    _check(model, source)
    return model


def _mla_layers(linear: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """0-based MLA layers; the two lists of config.json are 1-based and must cover every layer once."""
    full = [int(n) - 1 for n in linear.get("full_attn_layers", [])]
    kda = [int(n) - 1 for n in linear.get("kda_layers", [])]
    if sorted(full + kda) != list(range(layers)):
        raise ConfigError(
            f"{source}: linear_attn_config.full_attn_layers and kda_layers must name each of the layers 1..{layers} once",
            param="linear_attn_config",
        )
    return tuple(sorted(full))


def _check(model: ModelConfig, source: str) -> None:
    """Rules between keys."""
    if model.num_experts_per_token > model.num_experts:
        raise ConfigError(
            f"{source}: num_experts_per_token = {model.num_experts_per_token} exceeds num_experts = {model.num_experts}",
            param="num_experts_per_token",
        )
    for key in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(model, key) % 32:
            raise ConfigError(f"{source}: {key} = {getattr(model, key)} must be a multiple of the MXFP4 group, 32", param=key)
    for token in (*model.eos_token_ids, model.bos_token_id, model.pad_token_id):
        if not 0 <= token < model.vocab_size:
            raise ConfigError(f"{source}: special token id {token} is outside the vocabulary of {model.vocab_size}")
