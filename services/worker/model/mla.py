"""Multi-head latent attention without rotary, with a gated output (spec k3-model §4). Heads are sharded over TP."""

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.model import ModelConfig
from services.worker.model.batch import ForwardBatch, TensorParallel


class MlaAttention:
    """One layer. It always runs in the absorbed form, whose cached row is the same for every head."""

    def __init__(
        self,
        model: ModelConfig,
        weights: MutableMapping[str, Tensor],
        name: str,
        cache: Tensor,  # [blocks, 128, 1, mla_row]
        tp: TensorParallel,
        ops: Ops,
    ):
        self._model, self._cache, self._tp, self._ops = model, cache, tp, ops
        self._in = weights.pop(f"{name}.in_proj.weight")
        self._q_norm = weights.pop(f"{name}.q_a_layernorm.weight")
        self._kv_norm = weights.pop(f"{name}.kv_a_layernorm.weight")
        self._q_b = weights.pop(f"{name}.q_b_proj.weight")
        self._o = weights.pop(f"{name}.o_proj.weight")
        self._heads = model.num_attention_heads // tp.size
        kv_b = weights.pop(f"{name}.kv_b_proj.weight").unflatten(0, (self._heads, -1))
        self._w_key, self._w_value = kv_b.split([model.qk_nope_head_dim, model.v_head_dim], dim=1)  # [H, dim, latent]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, h], normed -> [T, h], reduced over TP. Writes the batch's rows to the cache."""
        model, ops = self._model, self._ops
        widths = [model.q_lora_rank, model.mla_row, self._heads * model.v_head_dim]
        q_low, row, gate = F.linear(x, self._in).split(widths, dim=-1)

        self._write(row, batch.write_slots)

        q = F.linear(ops.rms_norm(q_low, self._q_norm, model.rms_norm_eps), self._q_b).unflatten(-1, (self._heads, -1))
        q_nope, q_extra = q.split([model.qk_nope_head_dim, model.qk_rope_head_dim], dim=-1)
        q = torch.cat([torch.einsum("thd,hdl->thl", q_nope, self._w_key), q_extra], dim=-1)

        attention = ops.mla_extend if batch.mode == "extend" else ops.mla_decode
        o = attention(
            q,
            self._cache,
            batch.block_tables,
            batch.context_lens,
            batch.cu_seqlens,
            model.qk_head_dim**-0.5,
            model.kv_lora_rank,
            batch.plans,
        )
        o = torch.einsum("thl,hdl->thd", o, self._w_value).flatten(1)
        return self._tp.all_reduce(F.linear(o * gate.sigmoid(), self._o))

    def write(self, x: Tensor, write_slots: Tensor) -> None:
        """The cache rows of x [T, h] alone, as __call__ writes them to its batch's slots [T]."""
        first = self._model.q_lora_rank
        self._write(F.linear(x, self._in[first : first + self._model.mla_row]), write_slots)

    def _write(self, row: Tensor, write_slots: Tensor) -> None:
        latent, shared = row.split([self._model.kv_lora_rank, self._model.qk_rope_head_dim], dim=-1)
        latent = self._ops.rms_norm(latent, self._kv_norm, self._model.rms_norm_eps)
        self._ops.mla_write(torch.cat([latent, shared], dim=-1), write_slots, self._cache)
