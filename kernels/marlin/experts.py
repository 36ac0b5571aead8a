"""Routed MXFP4 experts by Marlin's grouped product (library.py); bfloat16 rows, both layouts of spec moe-ep §3, §4.

Schedules are made and counted on the device, so calls can be captured; SiTU runs on the scheduled rows alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.marlin import library, rows

GROUPED_BLOCK = 16  # rows of one expert that are multiplied together; of a captured graph, so no function of counts


def prepare_experts(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, beta: float, linear_beta: float, dtype: torch.dtype
) -> "MarlinExperts":
    del dtype  # bfloat16, as `supports` says
    return MarlinExperts(_Weights(w13, w13_scale), _Weights(w2, w2_scale), beta, linear_beta)


class _Weights:
    """One product's, of all experts."""

    def __init__(self, packed: Tensor, scale: Tensor):
        self.tiles = torch.stack([library.repack(it) for it in packed])
        self.scales = torch.stack([library.permute_scales(it).view(torch.uint8) for it in scale]).view(torch.float8_e8m0fnu)


class MarlinExperts:
    def __init__(self, first: _Weights, second: _Weights, beta: float, linear_beta: float):
        self.num_local = first.tiles.shape[0]
        self._first, self._second, self._beta, self._linear_beta = first, second, beta, linear_beta

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not ids.numel():
            return torch.empty_like(x)
        block = _block(ids.numel() / self.num_local)
        schedule = library.align(ids.int(), block, self.num_local)
        y = self._mlp(x.contiguous(), schedule, block, ids.shape[1], ids.numel())
        return rows.combine(y, ids.contiguous(), weights.contiguous())

    def grouped(self, x: Tensor, counts: Tensor, most: int | None = None) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.numel():
            return out
        bound = min(x.shape[0] * x.shape[1], x.numel() if most is None else most) + self.num_local * (GROUPED_BLOCK - 1)
        bound = -(-bound // GROUPED_BLOCK) * GROUPED_BLOCK
        packed, *schedule = rows.pack(x.contiguous(), counts, bound, GROUPED_BLOCK)
        rows.unpack(self._mlp(packed, schedule, GROUPED_BLOCK, 1, bound), counts, out, GROUPED_BLOCK)
        return out

    def _mlp(self, x: Tensor, schedule: Sequence[Tensor], block: int, routes_a_row: int, size: int) -> Tensor:
        gate_up = library.multiply(x, self._first.tiles, self._first.scales, schedule, block, routes_a_row, size)
        inner = rows.situ(gate_up, schedule, block, self._beta, self._linear_beta)
        return library.multiply(inner, self._second.tiles, self._second.scales, schedule, block, 1, size)


def _block(rows_an_expert: float) -> int:
    """The smallest that holds an expert's rows, or the largest there is."""
    return next((block for block in (8, 16, 32, 48) if rows_an_expert < 0.9 * block), 64)
