"""The tensors of a K3 checkpoint (spec k3-model §10) and random values for them, the same bytes on every machine.

Values come from Philox's raw 64-bit words, keyed by seed and tensor name, through integer arithmetic and exact float
operations only: no library's sampling or logarithm, whose last bits change with versions and processors.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import frexp, prod, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.contracts.model import ModelConfig

GROUP = 32  # input columns that share one MXFP4 scale
E8M0_BIAS = 127
NIBBLE_RMS = 2.9261749776799064  # of the 16 E2M1 values, all equally likely
BLOCK_VALUES = 1 << 22  # drawn at once; a tensor of the full model does not fit into memory several times
QUIET = 0.25  # factor on output rows of tokens that a reader should rarely see
ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: where it is, and what is drawn for it. `dtype` is spelled as in safetensors."""

    name: str
    dtype: Literal["F32", "BF16", "U8"]
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    drawn: int | None = None  # only so many leading rows are drawn, the rest is zero padding
    exponent: int | None = None  # of MXFP4 scales: 2^exponent or half of it
    quiet_rows: tuple[int, ...] = field(default=(), repr=False)
    key: str = ""  # tensors of one key have the same values; by default the name

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def blocks(self, seed: int) -> Iterator[bytes]:
        """The tensor's bytes, row-major, little-endian, some rows at a time."""
        key = int.from_bytes(hashlib.sha256(f"{seed}/{self.key or self.name}".encode()).digest()[:16], "little")
        words = np.random.Philox(key=key)
        rows, width = self.shape[0], prod(self.shape[1:])
        step = max(1, BLOCK_VALUES // width)
        for first in range(0, rows, step):
            yield self._rows(words, first, min(step, rows - first), width)

    def _rows(self, words: np.random.Philox, first: int, rows: int, width: int) -> bytes:
        count = rows * width
        if self.exponent is not None:
            lower = _bytes(words, count) & 1
            return (np.uint8(E8M0_BIAS + self.exponent) - lower).tobytes()
        if self.dtype == "U8":
            return _bytes(words, count).tobytes()
        values = _bell(words, count).reshape(rows, width) * np.float32(self.std) + np.float32(self.mean)
        if self.drawn is not None:
            values[max(0, self.drawn - first) :] = 0
        quiet = [row - first for row in self.quiet_rows if first <= row < first + rows]
        values[quiet] *= np.float32(QUIET)
        return values.astype("<f4").tobytes() if self.dtype == "F32" else _bfloat16(values).tobytes()


def tensor_specs(model: ModelConfig, quiet_tokens: tuple[int, ...] = ()) -> Iterator[TensorSpec]:
    """All tensors in the order of the forward pass. `quiet_tokens` get small output rows."""
    m, prefix = model, "language_model."
    yield embedding(m)
    for layer in range(m.num_hidden_layers):
        yield from _layer(m, layer, f"{prefix}model.layers.{layer}.")
    yield norm(f"{prefix}model.output_attn_res_norm.weight", m.hidden_size)
    yield mix_query(f"{prefix}model.output_attn_res_proj.weight", m.hidden_size)
    yield norm(f"{prefix}model.norm.weight", m.hidden_size)
    yield head(m, quiet_tokens)


def embedding(m: ModelConfig) -> TensorSpec:
    return TensorSpec("language_model.model.embed_tokens.weight", "BF16", (m.vocab_size, m.hidden_size), std=1.0)


def head(m: ModelConfig, quiet_tokens: tuple[int, ...]) -> TensorSpec:
    shape, std = (m.vocab_size, m.hidden_size), 2 / sqrt(m.hidden_size)
    return TensorSpec("language_model.lm_head.weight", "BF16", shape, std=std, quiet_rows=quiet_tokens)


def _layer(m: ModelConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    h = m.hidden_size
    yield norm(f"{prefix}self_attention_res_norm.weight", h)
    yield mix_query(f"{prefix}self_attention_res_proj.weight", h)
    yield norm(f"{prefix}input_layernorm.weight", h)
    yield from (mla if m.is_mla(layer) else _kda)(m, f"{prefix}self_attn.")
    yield norm(f"{prefix}mlp_res_norm.weight", h)
    yield mix_query(f"{prefix}mlp_res_proj.weight", h)
    yield norm(f"{prefix}post_attention_layernorm.weight", h)
    if m.is_dense(layer):
        yield from _mlp(f"{prefix}mlp.", h, m.intermediate_size)
    else:
        yield from moe(m, f"{prefix}block_sparse_moe.")


def _kda(m: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    h, heads, dim = m.hidden_size, m.kda_num_heads, m.kda_head_dim
    width = heads * dim
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield linear(f"{prefix}{name}", width, h)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield TensorSpec(f"{prefix}{name}.weight", "F32", (width, 1, m.conv_kernel_size), std=1.2 / sqrt(m.conv_kernel_size))
    yield linear(f"{prefix}f_a_proj", dim, h)
    yield linear(f"{prefix}f_b_proj", width, dim)
    yield linear(f"{prefix}b_proj", heads, h)
    padded = -(-heads // GROUP) * GROUP  # the release pads 96 heads to 128
    yield TensorSpec(f"{prefix}A_log", "F32", (padded,), std=0.5, drawn=heads)
    yield TensorSpec(f"{prefix}dt_bias", "F32", (width,), std=1.0, mean=-3.0)  # most channels remember for long
    yield TensorSpec(f"{prefix}o_norm.weight", "F32", (dim,), std=0.2, mean=1.0)
    yield linear(f"{prefix}o_proj", h, width)


def mla(m: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    h, heads = m.hidden_size, m.num_attention_heads
    values = heads * m.v_head_dim
    yield linear(f"{prefix}q_a_proj", m.q_lora_rank, h)
    yield norm(f"{prefix}q_a_layernorm.weight", m.q_lora_rank)
    yield linear(f"{prefix}q_b_proj", heads * m.qk_head_dim, m.q_lora_rank, gain=1.5)
    yield linear(f"{prefix}kv_a_proj_with_mqa", m.mla_row, h)
    yield norm(f"{prefix}kv_a_layernorm.weight", m.kv_lora_rank)
    yield linear(f"{prefix}kv_b_proj", heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank, gain=1.5)
    yield linear(f"{prefix}g_proj", values, h)
    yield linear(f"{prefix}o_proj", h, values)


def _mlp(prefix: str, outer: int, inner: int) -> Iterator[TensorSpec]:
    yield linear(f"{prefix}gate_proj", inner, outer, gain=2)
    yield linear(f"{prefix}up_proj", inner, outer, gain=2)
    yield linear(f"{prefix}down_proj", outer, inner, gain=2)


def moe(m: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    h, latent, inner = m.hidden_size, m.routed_expert_hidden_size, m.moe_intermediate_size
    yield linear(f"{prefix}gate", m.num_experts, h)
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", "F32", (m.num_experts,), std=0.1)
    yield linear(f"{prefix}routed_expert_down_proj", latent, h)
    yield norm(f"{prefix}routed_expert_norm.weight", latent)
    yield linear(f"{prefix}routed_expert_up_proj", h, latent)
    yield from _mlp(f"{prefix}shared_experts.", h, m.shared_intermediate_size)
    for expert in range(m.num_experts):
        for name, rows, columns in (("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner)):
            yield from _mxfp4(f"{prefix}experts.{expert}.{name}", rows, columns)


def linear(name: str, rows: int, columns: int, gain: float = 1) -> TensorSpec:
    """Inputs of unit variance give outputs of variance gain^2."""
    return TensorSpec(f"{name}.weight", "BF16", (rows, columns), std=gain / sqrt(columns))


def _mxfp4(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    """Random E2M1 values, scales chosen for a gain near 2."""
    _, exponent = frexp(2 / sqrt(columns) / NIBBLE_RMS)
    yield TensorSpec(f"{name}.weight_packed", "U8", (rows, columns // 2))
    yield TensorSpec(f"{name}.weight_scale", "U8", (rows, columns // GROUP), exponent=exponent)


def norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, "BF16", (width,), std=0.2, mean=1.0)


def mix_query(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, "BF16", (1, width), std=1.5 / sqrt(width))


def _bell(words: np.random.Philox, count: int) -> npt.NDArray[np.float32]:
    """`count` values of mean 0 and variance 1, nearly normal: sums of four uniform 16-bit integers."""
    parts = words.random_raw(count).view(np.uint16).reshape(count, 4)
    variance = 4 * (2.0**32 - 1) / 12
    return ((parts.sum(axis=1, dtype=np.int64) - 2 * 0xFFFF) / sqrt(variance)).astype(np.float32)


def _bytes(words: np.random.Philox, count: int) -> npt.NDArray[np.uint8]:
    return words.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
