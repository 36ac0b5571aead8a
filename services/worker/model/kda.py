"""Kimi delta attention: projections, and the state in a request's slot (spec k3-model §5, §6). Heads are sharded over TP.

Rows of a verify round may be rejected, so they leave the state alone; what they were computed from is kept, and `commit`
replays the accepted ones (spec speculation §8, scheme B). Kept are q, k, v before the convolution, the decay's low-rank
form and beta: 3 H D + D + H elements a row, at K3's TP8 in bfloat16 9,496 bytes a row and layer, 5.0 MiB a request of 8 rows
and 69 layers. A snapshot of the state after each row would take 482 MiB.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.model import ModelConfig
from services.worker.model.batch import ForwardBatch, TensorParallel


@dataclass(frozen=True, slots=True)
class _Verified:
    """A verify round's rows of one layer, until they are committed."""

    qkv: Tensor  # [T, 3 * H * D]
    f_low: Tensor  # [T, D]
    beta: Tensor  # [T, H]


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
        self._in = _aligned(weights.pop(f"{name}.in_proj.weight"))
        self._conv_weight = weights.pop(f"{name}.conv1d.weight")
        self._f_b = weights.pop(f"{name}.f_b_proj.weight")
        self._a_log = weights.pop(f"{name}.A_log")
        self._dt_bias = weights.pop(f"{name}.dt_bias")
        self._o_norm = weights.pop(f"{name}.o_norm.weight")
        self._o = weights.pop(f"{name}.o_proj.weight")
        self._heads = model.kda_num_heads // tp.size
        self._verified: _Verified | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, h], normed -> [T, h], reduced over TP. Moves each sequence's slot on by its rows, unless they are verified."""
        model, ops = self._model, self._ops
        per_head = (self._heads, model.kda_head_dim)
        channels = self._heads * model.kda_head_dim
        widths = [3 * channels, channels, model.kda_head_dim, self._heads]
        qkv, gate, f_low, beta = F.linear(x, self._in)[:, : sum(widths)].split(widths, dim=-1)
        o = self._verify(qkv, f_low, beta, batch) if batch.verify else self._advance(qkv, f_low, beta, batch)
        o = ops.kda_output(o, gate.unflatten(-1, per_head), self._o_norm, model.rms_norm_eps)
        return self._tp.all_reduce(F.linear(o, self._o))

    def commit(self, batch: ForwardBatch, accepted: Tensor) -> None:
        """Moves each slot on by the first accepted[b] rows of the verify round that this layer ran last; accepted [B] int64."""
        rows = self._verified
        assert rows is not None, "commit follows a verify round"
        self._ops.kda_commit(
            rows.qkv,
            self._conv_weight,
            self._conv,
            self._decay(rows.f_low),
            rows.beta,
            self._a_log,
            self._dt_bias,
            self._model.gate_lower_bound,
            self._recurrent,
            batch.slots,
            batch.cu_seqlens,
            accepted,
        )

    def _advance(self, qkv: Tensor, f_low: Tensor, beta: Tensor, batch: ForwardBatch) -> Tensor:
        ops = self._ops
        qkv = ops.short_conv(qkv, self._conv_weight, self._conv, batch.slots, batch.fresh, batch.cu_seqlens)
        scan = ops.kda_extend if batch.mode == "extend" else ops.kda_decode
        return scan(
            *self._heads_of(qkv),
            self._decay(f_low),
            beta,
            self._a_log,
            self._dt_bias,
            self._model.gate_lower_bound,
            self._recurrent,
            batch.slots,
            batch.fresh,
            batch.cu_seqlens,
        )

    def _verify(self, qkv: Tensor, f_low: Tensor, beta: Tensor, batch: ForwardBatch) -> Tensor:
        self._verified = _Verified(qkv.contiguous(), f_low.contiguous(), beta.contiguous())  # not the gate beside them
        convolved = self._ops.short_conv_verify(qkv, self._conv_weight, self._conv, batch.slots, batch.cu_seqlens)
        return self._ops.kda_verify(
            *self._heads_of(convolved),
            self._decay(f_low),
            beta,
            self._a_log,
            self._dt_bias,
            self._model.gate_lower_bound,
            self._recurrent,
            batch.slots,
            batch.cu_seqlens,
        )

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, 3 * H * D] -> q, k, v, each [T, H, D]."""
        q, k, v = qkv.unflatten(-1, (3, self._heads, self._model.kda_head_dim)).unbind(1)
        return q, k, v

    def _decay(self, f_low: Tensor) -> Tensor:
        """[T, D] -> [T, H, D] raw."""
        return F.linear(f_low, self._f_b).unflatten(-1, (self._heads, self._model.kda_head_dim))


def _aligned(weight: Tensor) -> Tensor:
    """With rows of zeros at its end, so that a product's rows begin at multiples of 16 bytes: on an H200 the 6,284 columns of
    K3's rank at TP8 take 113 us as they are, and 31 us as 6,288."""
    return F.pad(weight, (0, 0, 0, -weight.shape[0] % 8))
