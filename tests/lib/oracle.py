"""An independent forward pass of K3's text model: numpy alone, one process, one pass, straight from the equations
(spec k3-model §2-§9). It shares no code with kernels or workers, reads the checkpoint's bytes itself, and has no cache,
chunks, shards or batches: what those do must not change a token.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TIE = 2e-3  # logits closer than this may order differently under another order of float32 additions


class Oracle:
    """The model of one checkpoint directory; `dtype` float64 tells rounding from a wrong structure."""

    def __init__(self, directory: Path | str, dtype: npt.DTypeLike = np.float32):
        self.dtype = np.dtype(dtype)
        self.config: dict[str, Any] = json.loads(Path(directory, "config.json").read_text())["text_config"]
        self._files = [_Safetensors(path) for path in sorted(Path(directory).glob("*.safetensors"))]
        self._mla_layers = {n - 1 for n in self.config["linear_attn_config"]["full_attn_layers"]}
        self.weight = cache(self._weight)

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[T, vocab]: row t holds the scores of token t + 1, given tokens 0..t."""
        c = self.config
        prefix = self.weight("model.embed_tokens")[np.asarray(token_ids)]
        blocks: list[Array] = []
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = self._rms(self._mix(blocks, prefix, f"{name}self_attention_res"), f"{name}input_layernorm")
            attention = self._mla if layer in self._mla_layers else self._kda
            a = attention(x, f"{name}self_attn.")
            if layer % c["attn_res_block_size"] == 0:
                blocks.append(prefix)
                prefix = a
            else:
                prefix = prefix + a
            y = self._rms(self._mix(blocks, prefix, f"{name}mlp_res"), f"{name}post_attention_layernorm")
            dense = layer < c["first_k_dense_replace"]
            prefix = prefix + (self._mlp(y, f"{name}mlp.") if dense else self._moe(y, f"{name}block_sparse_moe."))
        z = self._mix(blocks, prefix, "model.output_attn_res")
        return self._rms(z, "model.norm") @ self.weight("lm_head").T

    def assert_greedy(self, prompt_ids: Sequence[int], output_ids: Sequence[int], tie: float = TIE) -> None:
        """Every output token has the highest logit given all tokens before it, within `tie` of it where two nearly agree.

        One forward over prompt and output: by causality its row t is what a full recompute over tokens 0..t would give,
        so this is the check of each step by itself.
        """
        rows = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        for step, (row, token) in enumerate(zip(rows, output_ids, strict=True)):
            best = int(row.argmax())
            behind = float(row[best] - row[token])
            assert behind <= tie, (
                f"output token {step} is {token}, but {best} is the likeliest: logit {row[best]:.6f} against {row[token]:.6f}; "
                f"{step} tokens before it are right: {list(output_ids[:step])}"
            )

    def _mix(self, blocks: list[Array], prefix: Array, name: str) -> Array:
        """Attention over depth: the candidates' softmax-weighted sum (§2)."""
        candidates = np.stack([*blocks, prefix])
        scores = _normalise(candidates, 1e-5) @ (self.weight(f"{name}_norm") * self.weight(f"{name}_proj")[0])
        return (_softmax(scores, axis=0)[..., None] * candidates).sum(axis=0)

    def _mla(self, x: Array, name: str) -> Array:
        """§4, the expanded form."""
        c, tokens = self.config, len(x)
        heads, nope, shared, value = (
            c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q = self._rms(self._linear(x, f"{name}q_a_proj"), f"{name}q_a_layernorm")
        q = self._linear(q, f"{name}q_b_proj").reshape(tokens, heads, nope + shared)
        r = self._linear(x, f"{name}kv_a_proj_with_mqa")
        latent, k_shared = r[:, : c["kv_lora_rank"]], r[:, c["kv_lora_rank"] :]
        kv = self._linear(self._rms(latent, f"{name}kv_a_layernorm"), f"{name}kv_b_proj")
        kv = kv.reshape(tokens, heads, nope + value)
        k = np.concatenate([kv[..., :nope], np.broadcast_to(k_shared[:, None], (tokens, heads, shared))], axis=-1)
        scores = np.einsum("thd,shd->hts", q, k, optimize=True) * self.dtype.type((nope + shared) ** -0.5)
        scores[:, np.triu(np.ones((tokens, tokens), bool), k=1)] = -np.inf
        o = np.einsum("hts,shd->thd", _softmax(scores, axis=-1), kv[..., nope:], optimize=True).reshape(tokens, -1)
        return self._linear(o * _sigmoid(self._linear(x, f"{name}g_proj")), f"{name}o_proj")

    def _kda(self, x: Array, name: str) -> Array:
        """§5 and §6, token by token."""
        linear, tokens = self.config["linear_attn_config"], len(x)
        heads, dim = linear["num_heads"], linear["head_dim"]

        def by_head(y: Array) -> Array:
            return y.reshape(tokens, heads, dim)

        q, k, v = (by_head(_silu(self._conv(self._linear(x, f"{name}{u}_proj"), f"{name}{u}_conv1d"))) for u in "qkv")
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * self.dtype.type(dim**-0.5)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        f = by_head(self._linear(self._linear(x, f"{name}f_a_proj"), f"{name}f_b_proj"))
        rate = np.exp(self.weight(f"{name}A_log").ravel()[:heads])[:, None]
        bias = self.weight(f"{name}dt_bias").reshape(heads, dim)
        decay = np.exp(self.dtype.type(linear["gate_lower_bound"]) * _sigmoid(rate * (f + bias)))
        beta = _sigmoid(self._linear(x, f"{name}b_proj"))

        state = np.zeros((heads, dim, dim), self.dtype)  # [head, key, value]
        o = np.empty((tokens, heads, dim), self.dtype)
        for t in range(tokens):
            state *= decay[t, :, :, None]
            error = beta[t, :, None] * (v[t] - (k[t, :, None] @ state)[:, 0])
            state += k[t, :, :, None] * error[:, None]
            o[t] = (q[t, :, None] @ state)[:, 0]
        o = self._rms(o, f"{name}o_norm") * _sigmoid(by_head(self._linear(x, f"{name}g_proj")))
        return self._linear(o.reshape(tokens, -1), f"{name}o_proj")

    def _conv(self, u: Array, name: str) -> Array:
        """Causal depthwise convolution; the last tap meets the current token, history starts as zeros."""
        taps = self.weight(name)[:, 0]
        width = taps.shape[1]
        padded = np.concatenate([np.zeros((width - 1, u.shape[1]), self.dtype), u])
        return sum((taps[:, j] * padded[j : j + len(u)] for j in range(width)), np.zeros_like(u))

    def _mlp(self, x: Array, name: str) -> Array:
        return self._linear(
            self._situ(self._linear(x, f"{name}gate_proj"), self._linear(x, f"{name}up_proj")), f"{name}down_proj"
        )

    def _moe(self, x: Array, name: str) -> Array:
        """§8 and §9, expert by expert."""
        c = self.config
        scores = _sigmoid(self._linear(x, f"{name}gate"))
        choice = scores + self.weight(f"{name}gate.e_score_correction_bias")
        ids = np.argsort(-choice, axis=1, kind="stable")[:, : c["num_experts_per_token"]]
        weights = np.take_along_axis(scores, ids, axis=1)
        weights = weights / (weights.sum(axis=1, keepdims=True) + self.dtype.type(1e-20))
        weights = weights * self.dtype.type(c["routed_scaling_factor"])
        z = self._linear(x, f"{name}routed_expert_down_proj")
        routed = np.zeros_like(z)
        for expert in np.unique(ids):
            w1, w2, w3 = (self.weight(f"{name}experts.{expert}.{w}") for w in ("w1", "w2", "w3"))
            row, k = np.nonzero(ids == expert)
            routed[row] += weights[row, k, None] * (self._situ(z[row] @ w1.T, z[row] @ w3.T) @ w2.T)
        up = self._linear(self._rms(routed, f"{name}routed_expert_norm"), f"{name}routed_expert_up_proj")
        return up + self._mlp(x, f"{name}shared_experts.")

    def _situ(self, g: Array, u: Array) -> Array:
        """§3."""
        beta, linear_beta = (self.dtype.type(self.config[f"activation_situ_{n}"]) for n in ("beta", "linear_beta"))
        return beta * np.tanh(g / beta) * _sigmoid(g) * (linear_beta * np.tanh(u / linear_beta))

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weight(name).T

    def _rms(self, x: Array, name: str) -> Array:
        return _normalise(x, self.config["rms_norm_eps"]) * self.weight(name)

    def _weight(self, name: str) -> Array:
        """A tensor by its name after `language_model.`, with or without `.weight`; MXFP4 is expanded (§10)."""
        full = f"language_model.{name}"
        for file in self._files:
            for key in (full, f"{full}.weight"):
                if key in file.header:
                    return file.read(key).astype(self.dtype)
        packed, scale = (
            next(f.read(f"{full}.weight_{part}") for f in self._files if f"{full}.weight_{part}" in f.header)
            for part in ("packed", "scale")
        )
        values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(len(packed), -1)
        return (values * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)).astype(self.dtype)


class _Safetensors:
    """One file: 8 bytes of header length, the header in JSON, the data."""

    def __init__(self, path: Path):
        self._bytes = np.memmap(path, np.uint8, mode="r")
        length = int(self._bytes[:8].view("<u8")[0])
        self.header: dict[str, Any] = json.loads(self._bytes[8 : 8 + length].tobytes())
        self._data = 8 + length

    def read(self, key: str) -> Array:
        entry = self.header[key]
        begin, end = entry["data_offsets"]
        raw = self._bytes[self._data + begin : self._data + end].tobytes()
        if entry["dtype"] == "BF16":  # the upper half of a float32
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": "<f4", "U8": "u1"}[entry["dtype"]])
        return values.reshape(entry["shape"])


def _normalise(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(eps))


def _softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
