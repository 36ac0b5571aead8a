"""What the model's layers work on: one batch of rows, the caches, what crosses a stage, and the two seams to parallelism."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from kernels.ops import Plans
from services.contracts.ids import BLOCK_TOKENS

Mode = Literal["extend", "decode"]  # prompt chunks: experts by normal dispatch; decode rounds: by low latency


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of B sequences, sequence after sequence. Index tensors live on the compute device.

    A row is live iff its write slot is at least 128 (block 0 is the null block); padding rows carry write slot 0,
    slot 0 and a null block table, and are never read by a live row.
    """

    mode: Mode
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute
    cu_seqlens: torch.Tensor  # [B+1] int32: rows of sequence b are cu[b]..cu[b+1]
    context_lens: torch.Tensor  # [B] int32: rows in the cache once this batch's are written
    block_tables: torch.Tensor  # [B, M] int32, 128-row blocks, unused entries 0
    write_slots: torch.Tensor  # [T] int64 = block * 128 + position % 128
    slots: torch.Tensor  # [B] int64 KDA slots, 0 = null
    fresh: torch.Tensor  # [B] bool: the sequence starts here, its KDA state is zero whatever the slot holds
    verify: bool = False  # rows may be rejected: KDA state stays as it is until DecoderStage.commit
    plans: Plans | None = None  # of attention, while the batch passes through the layers of a stage


def cache_slots(block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Write slots [B, R] int64 of rows at `positions` [B, R] of sequences with tables [B, M]."""
    return block_tables.gather(1, positions // BLOCK_TOKENS).long() * BLOCK_TOKENS + positions % BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Hop:
    """State of T rows between two layers (spec k3-model §2): what one stage sends to the next."""

    prefix: torch.Tensor  # [T, hidden] running sum of the open block
    blocks: torch.Tensor  # [closed, T, hidden]
    accumulator: torch.Tensor | None = None  # [T, draft_hidden] float32, DSpark's context sum


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """One rank's cache pools by target layer. Unit first: a block or a slot."""

    mla: dict[int, torch.Tensor]  # [num_blocks, 128, 1, mla_row]
    kda_rec: dict[int, torch.Tensor]  # [num_slots, heads, key dim, value dim] float32
    kda_conv: dict[int, torch.Tensor]  # [num_slots, 3 * heads * dim, conv_kernel_size - 1], oldest first
    draft: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])  # [num_blocks, 128, 1, row] by draft layer


class TensorParallel(Protocol):
    """The attention-TP group of one rank. Size 1 is a group too: everything is then the identity."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; the result is the same, bit for bit, on every rank. May reuse x's storage."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] on each rank -> [size * n, ...], rank order."""
        ...


class LocalExperts(Protocol):
    """This rank's experts, in both layouts (spec moe-ep §3, §4)."""

    num_local: int

    def routed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Normal mode. x [m, H]; ids [m, k] int64 local, or -1; weights [m, k] float32, 0 at -1. -> [m, H], weighted sums."""
        ...

    def grouped(self, x: torch.Tensor, counts: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Low latency. x [num_local, rows, H], those from counts[e] on undefined (NaN); the counts' sum is at most `most`.
        -> same shape, rows unweighted."""
        ...


class ExpertDispatcher(Protocol):
    """Brings rows to their experts and back over the EP group; gloo on CPU, DeepEP on GPUs. Collective: every rank calls it."""

    def forward(
        self,
        mode: Mode,
        z: torch.Tensor,  # [s, H] this rank's latent rows
        ids: torch.Tensor,  # [s, k] int64 global expert ids, -1 for padding
        weights: torch.Tensor,  # [s, k] float32, 0 at -1
        experts: LocalExperts,
        overlap: Callable[[], None] | None = None,  # queued between send and receive (shared experts)
    ) -> torch.Tensor:
        """-> [s, H], the complete weighted sum over the routes of each row."""
        ...
