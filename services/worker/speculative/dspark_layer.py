"""One layer of a DSpark drafter: plain pre-norm, MLA with rotary positions over context rows and the block, SwiGLU."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops, Plans
from services.contracts.draft import DraftConfig
from services.worker.model.batch import TensorParallel
from services.worker.speculative.rotary import rotate


@dataclass(frozen=True, slots=True)
class Block:
    """T = B * G rows of B blocks of G rows."""

    positions: Tensor  # [T] int64
    write_slots: Tensor  # [T] int64
    block_tables: Tensor  # [B, M] int32
    context_lens: Tensor  # [B] int32, the block's rows included
    cu_seqlens: Tensor  # [B+1] int32
    plans: Plans  # of attention


class DSparkLayer:
    """Attention in the absorbed form. The cached row is [latent | rotated key part], the same for every head and TP rank."""

    def __init__(
        self,
        draft: DraftConfig,
        name: str,
        weights: MutableMapping[str, Tensor],
        kv_a: Tensor,  # [row, d]
        cache: Tensor,  # [blocks, 128, 1, row]
        frequency: Tensor,
        tp: TensorParallel,
        ops: Ops,
    ):
        self._draft, self._kv_a, self._cache, self._frequency, self._tp, self._ops = draft, kv_a, cache, frequency, tp, ops
        attention = f"{name}.self_attn"
        self._input_norm = weights.pop(f"{name}.input_layernorm.weight")
        self._mlp_norm = weights.pop(f"{name}.post_attention_layernorm.weight")
        self._q_a = weights.pop(f"{attention}.q_a_proj.weight")
        self._q_norm = weights.pop(f"{attention}.q_a_layernorm.weight")
        self._kv_norm = weights.pop(f"{attention}.kv_a_layernorm.weight")
        self._heads = draft.num_attention_heads // tp.size
        self._q_b = weights.pop(f"{attention}.q_b_proj.weight")
        kv_b = weights.pop(f"{attention}.kv_b_proj.weight").unflatten(0, (self._heads, -1))
        self._w_key, self._w_value = kv_b.split([draft.qk_nope_head_dim, draft.v_head_dim], dim=1)  # [H, dim, latent]
        self._o = weights.pop(f"{attention}.o_proj.weight")
        self._gate_up = weights.pop(f"{name}.mlp.gate_up_proj.weight")
        self._down = weights.pop(f"{name}.mlp.down_proj.weight")

    def __call__(self, x: Tensor, block: Block) -> Tensor:
        """x [T, d] -> [T, d]. Writes the block's rows to the cache."""
        norm, eps = self._ops.rms_norm, self._draft.rms_norm_eps
        x = x + self._attend(norm(x, self._input_norm, eps), block)
        gate, up = F.linear(norm(x, self._mlp_norm, eps), self._gate_up).float().chunk(2, dim=-1)
        return x + self._tp.all_reduce(F.linear((F.silu(gate) * up).to(x.dtype), self._down))

    def write(self, latent: Tensor, key: Tensor, write_slots: Tensor) -> None:
        """kv_a's output, its latent [T, latent] and its key part [T, rope], rotated -> the cache, the latent normed."""
        latent = self._ops.rms_norm(latent, self._kv_norm, self._draft.rms_norm_eps)
        self._ops.mla_write(torch.cat([latent, key], dim=-1), write_slots, self._cache)

    def _attend(self, x: Tensor, block: Block) -> Tensor:
        draft, ops = self._draft, self._ops
        latent, key = F.linear(x, self._kv_a).split([draft.kv_lora_rank, draft.qk_rope_head_dim], dim=-1)
        self.write(latent, rotate(key, block.positions, self._frequency), block.write_slots)
        q = F.linear(ops.rms_norm(F.linear(x, self._q_a), self._q_norm, draft.rms_norm_eps), self._q_b)
        q_nope, q_key = q.unflatten(-1, (self._heads, -1)).split([draft.qk_nope_head_dim, draft.qk_rope_head_dim], dim=-1)
        q_key = rotate(q_key, block.positions, self._frequency)
        q = torch.cat([torch.einsum("thd,hdl->thl", q_nope, self._w_key), q_key], dim=-1)
        attention = ops.mla_decode if draft.block_causal else ops.mla_block
        o = attention(
            q,
            self._cache,
            block.block_tables,
            block.context_lens,
            block.cu_seqlens,
            draft.softmax_scale,
            draft.kv_lora_rank,
            block.plans,
        )
        o = torch.einsum("thl,hdl->thd", o, self._w_value).flatten(1)
        return self._tp.all_reduce(F.linear(o, self._o))
