"""Drafters once more, in numpy and straight from the equations (spec speculation §3 to §6, §11): attention expanded, taps
projected as one concatenation, rotation by complex numbers; no cache, no pipeline, no shards. Shares no code with the worker.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib.oracle import Array, Oracle, _normalise, _Safetensors, _silu, _softmax


class TargetOracle(Oracle):
    """The target, and what a drafter may read of it."""

    def states(self, token_ids: Sequence[int]) -> tuple[list[Array], list[Array], Array]:
        """`prefix` after each layer; what each layer, then the head, reads before its norm; the final hidden. [T, h] each."""
        c = self.config
        prefix = self.weight("model.embed_tokens")[np.asarray(token_ids)]
        blocks: list[Array] = []
        after, entries = [], []
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            entries.append(self._mix(blocks, prefix, f"{name}self_attention_res"))
            x = self._rms(entries[-1], f"{name}input_layernorm")
            a = (self._mla if layer in self._mla_layers else self._kda)(x, f"{name}self_attn.")
            if layer % c["attn_res_block_size"] == 0:
                blocks.append(prefix)
                prefix = a
            else:
                prefix = prefix + a
            y = self._rms(self._mix(blocks, prefix, f"{name}mlp_res"), f"{name}post_attention_layernorm")
            dense = layer < c["first_k_dense_replace"]
            prefix = prefix + (self._mlp(y, f"{name}mlp.") if dense else self._moe(y, f"{name}block_sparse_moe."))
            after.append(prefix)
        entries.append(self._mix(blocks, prefix, "model.output_attn_res"))
        return after, entries, self._rms(entries[-1], "model.norm")

    @property
    def head(self) -> Array:
        return self.weight("lm_head")


class DSparkOracle:
    """One drafter's directory beside its target."""

    def __init__(self, directory: Path | str, target: TargetOracle):
        self.target, self.dtype = target, target.dtype
        self.config: dict[str, Any] = json.loads(Path(directory, "config.json").read_text())
        (self._file,) = [_Safetensors(path) for path in Path(directory).glob("*.safetensors")]

    def context(self, token_ids: Sequence[int]) -> Array:
        """C [T, d] of every position."""
        after, entries, _ = self.target.states(token_ids)
        ids = self.config["target_layer_ids"]
        taps = [entries[n + 1] if self.config["aux_hidden_stream"] == "attn_res" else after[n] for n in ids]
        if self.config.get("fc_norm"):
            taps = [_normalise(tap, 1e-5) * self._w(f"fc_norm.{i}") for i, tap in enumerate(taps)]
        return self._rms(np.concatenate(taps, -1) @ self._w("context_proj").T, "context_norm")

    def rows(self, context: Array, layer: int) -> Array:
        """[T, kv_lora_rank + qk_rope_head_dim]: the cached rows of positions 0..T-1."""
        return self._row(context, layer, np.arange(len(context)))

    def propose(self, token_ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """Proposals behind `anchor`, which stands at position len(token_ids)."""
        c, context, start = self.config, self.context(token_ids), len(token_ids)
        heads, nope, rope, value = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        m = 0.1 * math.log(c["rope_parameters"]["factor"]) + 1
        at = np.arange(start, start + count)
        x = self._w("embed_tokens")[[anchor, *[c["mask_token_id"]] * (count - 1)]]
        for layer in range(c["num_hidden_layers"]):
            name = f"layers.{layer}."
            y = self._rms(x, f"{name}input_layernorm")
            rows = np.concatenate([self.rows(context, layer), self._row(y, layer, at)])
            latent, key = rows[:, : c["kv_lora_rank"]], rows[:, c["kv_lora_rank"] :]
            kv = (latent @ self._w(f"{name}self_attn.kv_b_proj").T).reshape(len(rows), heads, nope + value)
            q = self._rms(y @ self._w(f"{name}self_attn.q_a_proj").T, f"{name}self_attn.q_a_layernorm")
            q = (q @ self._w(f"{name}self_attn.q_b_proj").T).reshape(count, heads, nope + rope)
            turned = self._rotate(q[..., nope:], at)
            scores = np.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope]) + np.einsum("thd,sd->hts", turned, key)
            scores = scores * (nope + rope) ** -0.5 * m * m
            if c.get("block_causal"):
                scores[:, np.arange(len(rows)) > at[:, None]] = -np.inf
            o = np.einsum("hts,shd->thd", _softmax(scores, -1), kv[..., nope:]).reshape(count, -1)
            x = x + o @ self._w(f"{name}self_attn.o_proj").T
            y = self._rms(x, f"{name}post_attention_layernorm")
            inner = _silu(y @ self._w(f"{name}mlp.gate_proj").T) * (y @ self._w(f"{name}mlp.up_proj").T)
            x = x + inner @ self._w(f"{name}mlp.down_proj").T
        base = self._rms(x, "final_norm") @ self.target.head.T
        proposals, token = [], anchor
        for row in base:
            token = int((row + self._w("markov_head.markov_w2") @ self._w("markov_head.markov_w1")[token]).argmax())
            proposals.append(token)
        return proposals

    def _row(self, x: Array, layer: int, positions: Array) -> Array:
        latent = self.config["kv_lora_rank"]
        r = x @ self._w(f"layers.{layer}.self_attn.kv_a_proj_with_mqa").T
        normed = self._rms(r[:, :latent], f"layers.{layer}.self_attn.kv_a_layernorm")
        return np.concatenate([normed, self._rotate(r[:, latent:], positions)], -1)

    def _rotate(self, x: Array, positions: Array) -> Array:
        """Pairs (2i, 2i + 1) as complex numbers."""
        dim, rope = x.shape[-1], self.config["rope_parameters"]
        pair = np.arange(dim // 2)
        plain = rope["rope_theta"] ** (-2.0 * pair / dim)
        length = 2 * np.pi / plain  # positions of one turn
        original = rope["original_max_position_embeddings"]
        turns = dim * np.log(original / (2 * np.pi * np.array([rope["beta_fast"], rope["beta_slow"]])))
        low, high = turns / (2 * np.log(rope["rope_theta"]))
        low, high = max(np.floor(low), 0), min(np.ceil(high), dim - 1)
        slow = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
        assert np.all(np.diff(length) > 0)
        angle = positions[:, None] * (plain * (1 - slow) + plain / rope["factor"] * slow)
        turn = np.exp(1j * angle).reshape(len(positions), *[1] * (x.ndim - 2), dim // 2)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape).astype(self.dtype)

    def _rms(self, x: Array, name: str) -> Array:
        return _normalise(x, self.config["rms_norm_eps"]) * self._w(name)

    def _w(self, name: str) -> Array:
        return self._file.read(f"{name}.weight").astype(self.dtype)


class NextNOracle:
    """The layer behind the target's last, in the target's own directory."""

    def __init__(self, target: TargetOracle):
        self.target = target
        self._name = f"model.layers.{target.config['num_hidden_layers']}."

    def outputs(self, following: Sequence[int], hidden: Array) -> Array:
        """Row p from the token at p + 1 and the target's (or, while drafting, its own) hidden at p -> [T, h]."""
        t, name = self.target, self._name
        token = t._rms(t.weight(f"{name}embed_tokens")[np.asarray(following)], f"{name}enorm")
        x = np.concatenate([token, t._rms(hidden, f"{name}hnorm")], -1) @ t.weight(f"{name}eh_proj").T
        x = x + t._mla(t._rms(x, f"{name}input_layernorm"), f"{name}self_attn.")
        x = x + t._moe(t._rms(x, f"{name}post_attention_layernorm"), f"{name}block_sparse_moe.")
        return t._rms(x, f"{name}shared_head.norm")

    def propose(self, token_ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """Proposals behind `anchor`, which stands at position len(token_ids)."""
        following = [*token_ids[1:], anchor]
        hidden = self.target.states(token_ids)[2]
        proposals: list[int] = []
        while len(proposals) < count:
            out = self.outputs(following, hidden)
            proposals.append(int((out[-1] @ self.target.head.T).argmax()))
            following.append(proposals[-1])
            hidden = np.concatenate([hidden, out[-1:]])
        return proposals
