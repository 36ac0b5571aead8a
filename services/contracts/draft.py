"""The drafters' shapes, read from config.json's dictionary and checked against the target once (spec speculation §1, §9, §12),
and where in the target's layers a drafter's taps are (§4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from k3mesh.errors import ConfigError
from services.contracts.model import ModelConfig

PREFIX, ATTN_RES = "prefix", "attn_res"
TRAINED_WIDTH = 8  # of a checkpoint that does not name its block size


class TapKind(Enum):
    """Which vector of the target a tap reads."""

    EXIT = "the running sum after a layer"
    ENTRY = "the mixture that a layer reads, before its input norm"
    OUTPUT = "the mixture that the head reads, before its norm"


@dataclass(frozen=True, slots=True)
class Tap:
    """Tap `index` of a drafter is taken at target layer `layer`, on the stage that holds this layer."""

    index: int
    kind: TapKind
    layer: int


@dataclass(frozen=True)
class Yarn:
    """Static YaRN frequencies of a rotary embedding."""

    theta: float
    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float

    @property
    def magnitude(self) -> float:
        """m; the softmax scale of the attention has m^2 in it."""
        return 1.0 if self.factor <= 1 else 0.1 * self.mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class DraftConfig:
    """A k3_dspark checkpoint. Names follow config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Yarn
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    aux_hidden_stream: str
    fc_norm: bool
    mask_token_id: int
    markov_rank: int
    confidence_head: bool
    block_size: int | None  # proposals; None: not named
    block_causal: bool

    @property
    def mla_row(self) -> int:
        """Elements of one cached row: latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.magnitude**2

    @property
    def cache_layers(self) -> int:
        return self.num_hidden_layers

    def taps(self, target_layers: int) -> tuple[Tap, ...]:
        """One for each entry of target_layer_ids. An attn_res tap of layer L is what layer L + 1 reads, so its place is
        there; the last layer's is what the head reads."""
        last = target_layers - 1
        if self.aux_hidden_stream == PREFIX:
            return tuple(Tap(index, TapKind.EXIT, layer) for index, layer in enumerate(self.target_layer_ids))
        return tuple(
            Tap(index, TapKind.OUTPUT, last) if layer == last else Tap(index, TapKind.ENTRY, layer + 1)
            for index, layer in enumerate(self.target_layer_ids)
        )

    def check_width(self, width: int, source: str) -> None:
        """ConfigError (DRAFT_WIDTH) if the checkpoint does not support `width` verify rows."""
        if self.block_size is not None and width != self.block_size + 1:
            raise _width(
                f"{source}: block_size = {self.block_size} proposals were trained, {width - 1} are asked for",
                self.block_size + 1,
            )
        if self.block_size is None and width > TRAINED_WIDTH:
            raise _width(f"{source}: {TRAINED_WIDTH - 1} proposals were trained, {width - 1} are asked for", TRAINED_WIDTH)


@dataclass(frozen=True)
class NextNConfig:
    """The NextN layer behind a target's decoder layers (spec speculation §11)."""

    layer: int  # its index in the checkpoint
    mla_row: int

    @property
    def cache_layers(self) -> int:
        return 1

    def check_width(self, width: int, source: str) -> None:
        """One layer drafts any number of tokens, one after the other."""


Draft = DraftConfig | NextNConfig


def taps_in(taps: tuple[Tap, ...], window: range) -> tuple[Tap, ...]:
    """Those that the stage with these target layers takes."""
    return tuple(tap for tap in taps if tap.layer in window)


def trained_width(config: Mapping[str, Any], source: str) -> int:
    """The verify width that a k3_dspark checkpoint was trained for: its block of proposals and the anchor. ConfigError if that
    is no number."""
    block_size = _block_size(_Reader(config, source))
    return TRAINED_WIDTH if block_size is None else block_size + 1


def parse_draft_config(config: Mapping[str, Any], source: str, target: ModelConfig) -> DraftConfig:
    """Read a DSpark drafter's shape; ConfigError names the key of `source` (a path, for messages) and carries a code of §12."""
    if config.get("model_type", "k3_dspark") != "k3_dspark":
        raise _error("DRAFT_CONFIG", source, "model_type", config["model_type"], "must be 'k3_dspark'")
    if config.get("quantization_config"):
        raise _error("DRAFT_UNSUPPORTED", source, "quantization_config", "…", "a quantized drafter cannot be served")
    read = _Reader(config, source)
    for key, expected in (("mla_use_nope", False), ("mla_use_output_gate", False), ("hidden_act", "silu"),
                          ("markov_head_type", "vanilla")):  # fmt: skip
        read.expect(key, expected)
    draft = DraftConfig(
        hidden_size=read.positive("hidden_size"),
        intermediate_size=read.positive("intermediate_size"),
        num_hidden_layers=read.positive("num_hidden_layers"),
        num_attention_heads=read.positive("num_attention_heads"),
        q_lora_rank=read.positive("q_lora_rank"),
        kv_lora_rank=read.positive("kv_lora_rank"),
        qk_nope_head_dim=read.positive("qk_nope_head_dim"),
        qk_rope_head_dim=read.positive("qk_rope_head_dim"),
        v_head_dim=read.positive("v_head_dim"),
        vocab_size=read.positive("vocab_size"),
        rms_norm_eps=read.number("rms_norm_eps", config),
        rope=_yarn(read),
        max_position_embeddings=read.positive("max_position_embeddings"),
        target_layer_ids=_tap_ids(read, target),
        aux_hidden_stream=_stream(config, source),
        fc_norm=bool(config.get("fc_norm", False)),
        mask_token_id=read.integer("mask_token_id"),
        markov_rank=read.positive("markov_rank"),
        confidence_head=bool(config.get("enable_confidence_head", False)),
        block_size=_block_size(read),
        block_causal=bool(config.get("block_causal", False)),
    )
    _check(draft, read, target)
    return draft


def parse_nextn_config(config: Mapping[str, Any], source: str, target: ModelConfig) -> NextNConfig:
    """Whether a checkpoint has a NextN layer for this target; ConfigError (DRAFT_CONFIG) if not."""
    text = cast(Mapping[str, Any], config.get("text_config", config))
    count = text.get("num_nextn_predict_layers", 0)
    if count != 1:
        raise _error("DRAFT_CONFIG", source, "num_nextn_predict_layers", count, "--speculative-algorithm MTP needs exactly 1")
    for key, expected in (
        ("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size), ("num_hidden_layers", target.num_hidden_layers),
    ):  # fmt: skip
        if text.get(key) != expected:
            raise _error("DRAFT_TARGET_MISMATCH", source, key, text.get(key), f"the target has {expected}")
    return NextNConfig(target.num_hidden_layers, target.mla_row)


class _Reader:
    """Typed access to a config.json; what is wrong is DRAFT_CONFIG."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source

    def integer(self, key: str) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, value, "must be a whole number")
        return value

    def positive(self, key: str) -> int:
        value = self.integer(key)
        if value < 1:
            raise self.error(key, value, "must be at least 1")
        return value

    def number(self, key: str, of: Mapping[str, Any]) -> float:
        value = of.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, value, "must be a number above 0")
        return float(value)

    def expect(self, key: str, expected: object) -> None:
        if self.config.get(key, expected) != expected:
            raise self.error(key, self.config[key], f"is not supported; a K3 DSpark drafter has {expected!r}")

    def error(self, key: str, value: object, rule: str) -> ConfigError:
        return _error("DRAFT_CONFIG", self.source, key, value, rule)


def _block_size(read: _Reader) -> int | None:
    """Proposals of a block; None where the checkpoint does not name it."""
    key = "block_size" if "block_size" in read.config else "dspark_block_size"
    return None if read.config.get(key) is None else read.positive(key)


def _yarn(read: _Reader) -> Yarn:
    rope = cast(Mapping[str, Any], read.config.get("rope_parameters", read.config.get("rope_scaling")) or {})
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        raise read.error("rope_parameters.rope_type", kind, "must be 'yarn'")
    if rope.get("mscale", 1.0) != rope.get("mscale_all_dim", 1.0):
        raise read.error(
            "rope_parameters.mscale", rope.get("mscale"), "must equal mscale_all_dim, so that cos and sin stay unscaled"
        )
    theta = rope if "rope_theta" in rope else read.config
    return Yarn(
        theta=read.number("rope_theta", theta),
        factor=read.number("factor", rope),
        original_positions=int(read.number("original_max_position_embeddings", rope)),
        beta_fast=float(rope.get("beta_fast", 32)),
        beta_slow=float(rope.get("beta_slow", 1)),
        mscale=float(rope.get("mscale_all_dim", 1.0)),
    )


def _tap_ids(read: _Reader, target: ModelConfig) -> tuple[int, ...]:
    ids: Any = read.config.get("target_layer_ids")
    count = read.integer("num_target_layers")
    if not isinstance(ids, list) or not all(isinstance(n, int) for n in cast(list[Any], ids)):
        raise _error("TAP_CONFIG", read.source, "target_layer_ids", cast(object, ids), "must be a list of layer numbers")
    layers = cast(list[int], ids)
    if len(layers) != count:
        rule = f"names {len(layers)} taps, num_target_layers is {count}; they must agree"
        raise _error("TAP_CONFIG", read.source, "target_layer_ids", layers, rule)
    if not layers or sorted(set(layers)) != layers or layers[0] < 0 or layers[-1] >= target.num_hidden_layers:
        rule = f"must be ascending, different and from 0 to {target.num_hidden_layers - 1}, the target's layers"
        raise _error("TAP_CONFIG", read.source, "target_layer_ids", layers, rule)
    return tuple(layers)


def _stream(config: Mapping[str, Any], source: str) -> str:
    stream = config.get("aux_hidden_stream", PREFIX)
    if stream not in (PREFIX, ATTN_RES):
        raise _error("TAP_STREAM", source, "aux_hidden_stream", stream, f"must be {PREFIX!r} or {ATTN_RES!r}")
    return cast(str, stream)


def _check(draft: DraftConfig, read: _Reader, target: ModelConfig) -> None:
    """Rules between the drafter and its target."""
    for key, ours, theirs in (
        ("target_hidden_size", read.integer("target_hidden_size"), target.hidden_size),
        ("hidden_size", draft.hidden_size, target.hidden_size),  # it reads the target's embedding and head
        ("target_num_hidden_layers", read.integer("target_num_hidden_layers"), target.num_hidden_layers),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("draft_vocab_size", read.config.get("draft_vocab_size", draft.vocab_size), target.vocab_size),
    ):
        if ours != theirs:
            raise _error("DRAFT_TARGET_MISMATCH", read.source, key, ours, f"the target has {theirs}")
    if not 0 <= draft.mask_token_id < draft.vocab_size:
        raise read.error("mask_token_id", draft.mask_token_id, f"must be from 0 to {draft.vocab_size - 1}")
    if draft.qk_rope_head_dim % 2:
        raise read.error("qk_rope_head_dim", draft.qk_rope_head_dim, "must be even: rotation turns pairs")


def _width(message: str, width: int) -> ConfigError:
    return ConfigError(
        f"{message}; give --speculative-num-draft-tokens {width}", detail="DRAFT_WIDTH", param="speculative_num_draft_tokens"
    )


def _error(code: str, source: str, key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{source}: {key} = {value!r}: {rule}", detail=code, param=key)
