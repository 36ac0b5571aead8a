"""The typed signatures of every op. A backend implements some of them; kernels.registry chooses one for each, once, at start.

Letters: T rows of B sequences, sequence after sequence (`cu_seqlens` [B+1] int32: rows of sequence b are cu[b]..cu[b+1]);
h hidden size, H heads of this rank, D head dimension, L MLA latent, R shared key part, C channels, W conv width, k routes
a row. "model dtype" is bfloat16 or float32. T, B and single sequences may be empty everywhere. Unless an op says "in
place" it leaves its inputs alone. Inputs may be strided views.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

BLOCK_ROWS = 128  # rows of one cache block

# What attention derives from a batch's tables and lengths alone, under a backend's own key. The layers of one pass share it,
# which lives no longer than the pass: in a captured graph it is derived by the graph's first layer, in each replay anew.
Plans = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpGeometry:
    """What a backend needs to know to say whether it supports an op on one rank."""

    dtype: torch.dtype  # model dtype
    cache_dtype: torch.dtype  # of MLA rows and conv history
    hidden: int
    mla_heads: int
    mla_latent: int
    mla_shared: int
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    num_experts: int
    local_experts: int
    top_k: int
    moe_latent: int
    moe_inner: int


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., d], weight [d] float32 -> [..., d] in x's dtype: x / sqrt(mean x^2 + eps) * weight, in float32."""
        ...


class AttnResMix(Protocol):
    def __call__(self, blocks: Tensor, prefix: Tensor, weight: Tensor, eps: float) -> Tensor:
        """MIX over depth (spec k3-model §2). blocks [n, T, h] closed blocks (n may be 0), prefix [T, h] the last candidate,
        weight [h] float32 = norm weight * query -> [T, h] in prefix's dtype."""
        ...


class SituMul(Protocol):
    def __call__(self, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
        """gate_up [..., 2n], gate columns then up columns -> [..., n] (spec k3-model §3)."""
        ...


class MlaWrite(Protocol):
    def __call__(self, rows: Tensor, write_slots: Tensor, cache: Tensor) -> None:
        """rows [T, L+R] to cache [blocks, 128, 1, L+R], in place, at write_slots [T] int64 = block * 128 + row in block.
        Padding rows write slot 0, in any order."""
        ...


class MlaAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        latent: int,
        plans: Plans | None = None,
    ) -> Tensor:
        """Absorbed MLA over the paged cache, causal (spec k3-model §4).

        q [T, H, L+R] = [q_nope Wk | q_extra]; cache [blocks, 128, 1, L+R]; block_tables [B, M] int32; context_lens [B]
        int32, rows in the cache with this batch's included: the last row of a sequence sees all of them, the row before
        one less. -> [T, H, L], the weighted latents, in q's dtype; zero for a sequence with context 0 (padding). Other layers
        of the same pass, with caches of the same strides, may share `plans`.
        """
        ...


class MlaBlock(Protocol):
    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        latent: int,
        plans: Plans | None = None,
    ) -> Tensor:
        """As MlaAttention, but not causal: every row of a sequence sees all its context_lens rows (spec speculation §3)."""
        ...


class ShortConv(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, fresh: Tensor, cu_seqlens: Tensor) -> Tensor:
        """silu(causal depthwise conv) with carried history (spec k3-model §5).

        x [T, C]; weight [C, W] float32, the last column hits the current row; state [slots, C, W-1], oldest first, updated
        in place at slots [B] int64; where fresh [B] bool, or in the null slot 0, the history is zero. -> [T, C], x's dtype.
        """
        ...


class ShortConvVerify(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> Tensor:
        """ShortConv of rows that may be rejected: reads the history and leaves it as it is. No sequence is fresh."""
        ...


class KdaScan(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        state: Tensor,
        slots: Tensor,
        fresh: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        """The KDA recurrence (spec k3-model §6), normalisation of q and k, scale, decay and sigmoid(beta) inside.

        q, k, v, decay [T, H, D] (after conv and SiLU; decay raw); beta [T, H] logits; a_log [H], dt_bias [H, D] float32;
        state [slots, H, key, value] float32, updated in place at slots [B]; fresh as for ShortConv. -> o [T, H, D], q's dtype.
        """
        ...


class KdaVerify(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        """KdaScan of rows that may be rejected, equally many of each sequence and at most 8: reads the state and leaves it as
        it is. No sequence is fresh."""
        ...


class KdaCommit(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        conv_weight: Tensor,
        conv_state: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        accepted: Tensor,
    ) -> None:
        """Moves both states, in place, on by the first accepted[b] rows of each verified sequence (spec speculation §8).

        The rows are replayed from what verify was given, by its formulas in its order: qkv [T, 3 * H * D] before the
        convolution; the rest as for ShortConv and KdaScan. accepted [B] int64, at least 1 and at most the sequence's rows.
        Sequences of the null slot 0 are skipped.
        """
        ...


class KdaOutput(Protocol):
    def __call__(self, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """o, gate [T, H, D], weight [D] float32 -> rms(o) * weight * sigmoid(gate), [T, H * D] in o's dtype."""
        ...


class Router(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """x [s, h], weight [E, h], bias [E] float32 -> ids [s, k] int64 by falling score + bias, the smallest id first on
        ties, and weights [s, k] float32 = unbiased sigmoid scores (spec k3-model §8). Products and logits in float32."""
        ...


class Experts(Protocol):
    """One layer's local experts, prepared; both layouts of spec moe-ep §3 and §4."""

    num_local: int

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [m, latent], ids [m, k] int64 local or -1, weights [m, k] float32 (0 at -1) -> [m, latent], weighted and summed."""
        ...

    def grouped(self, x: Tensor, counts: Tensor, most: int | None = None) -> Tensor:
        """x [num_local, rows, latent], only the first counts[e] rows defined (the rest may be NaN); counts int32, whose sum is
        at most `most` (x's rows without it): a bound on scratch memory -> same shape, the first counts[e] rows unweighted
        expert outputs, the rest undefined."""
        ...


class PrepareExperts(Protocol):
    def __call__(
        self,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        beta: float,
        linear_beta: float,
        dtype: torch.dtype,
    ) -> Experts:
        """MXFP4 as loaded, uint8: w13 [E, 2 * inner, latent / 2] (gate rows, then up rows), w13_scale [E, 2 * inner,
        latent / 32], w2 [E, latent, inner / 2], w2_scale [E, latent, inner / 32]. The backend repacks as it needs."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each op; the field names are the op names of the registry."""

    rms_norm: RmsNorm
    attn_res_mix: AttnResMix
    situ_mul: SituMul
    mla_write: MlaWrite
    mla_extend: MlaAttention  # prompt chunks, any number of rows a sequence
    mla_decode: MlaAttention  # decode rounds, the same few rows for every sequence
    mla_block: MlaBlock  # a drafter's block of proposals
    short_conv: ShortConv
    short_conv_verify: ShortConvVerify
    kda_extend: KdaScan
    kda_decode: KdaScan
    kda_verify: KdaVerify
    kda_commit: KdaCommit
    kda_output: KdaOutput
    router: Router
    prepare_experts: PrepareExperts
