"""Kimi delta attention: projections, and the state in a request's slot (spec k3-model §5, §6). Heads are sharded over TP."""

from collections.abc import MutableMapping

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.model import ModelConfig
from services.worker.model.batch import ForwardBatch, TensorParallel


class KdaAttention:
    """One layer."""

    def __init__(
        self,
        model: ModelConfig,
        weights: MutableMapping[str, Tensor],
        name: str,
        recurrent: Tensor,  # [slots, H, key, value] float32
        conv: Tensor,  # [slots, 3 * H * D, W - 1]
        tp: TensorParallel,
        ops: Ops,
    ):
        self._model, self._recurrent, self._conv, self._tp, self._ops = model, recurrent, conv, tp, ops
        self._in = weights.pop(f"{name}.in_proj.weight")
        self._conv_weight = weights.pop(f"{name}.conv1d.weight")
        self._f_b = weights.pop(f"{name}.f_b_proj.weight")
        self._a_log = weights.pop(f"{name}.A_log")
        self._dt_bias = weights.pop(f"{name}.dt_bias")
        self._o_norm = weights.pop(f"{name}.o_norm.weight")
        self._o = weights.pop(f"{name}.o_proj.weight")
        self._heads = model.kda_num_heads // tp.size

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, h], normed -> [T, h], reduced over TP. Moves each sequence's slot on by its rows."""
        model, ops = self._model, self._ops
        per_head = (self._heads, model.kda_head_dim)
        channels = self._heads * model.kda_head_dim
        qkv, gate, f_low, beta = F.linear(x, self._in).split([3 * channels, channels, model.kda_head_dim, self._heads], dim=-1)
        decay = F.linear(f_low, self._f_b).unflatten(-1, per_head)

        qkv = ops.short_conv(qkv, self._conv_weight, self._conv, batch.slots, batch.fresh, batch.cu_seqlens)
        q, k, v = qkv.unflatten(-1, (3, *per_head)).unbind(1)
        scan = ops.kda_extend if batch.mode == "extend" else ops.kda_decode
        o = scan(
            q,
            k,
            v,
            decay,
            beta,
            self._a_log,
            self._dt_bias,
            model.gate_lower_bound,
            self._recurrent,
            batch.slots,
            batch.fresh,
            batch.cu_seqlens,
        )
        o = ops.kda_output(o, gate.unflatten(-1, per_head), self._o_norm, model.rms_norm_eps)
        return self._tp.all_reduce(F.linear(o, self._o))
