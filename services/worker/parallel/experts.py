"""The expert dispatcher over gloo: rows to their experts and back, with DeepEP's contract (spec moe-ep §3, §4, §9).

    dispatcher = GlooExperts(groups.ep, num_experts=896, capacity=256)
    c = dispatcher.forward("decode", z, ids, weights, experts, overlap=run_shared_experts)

Collective: every rank of the group calls forward in the same order with the same mode, with any number of rows (0 too).
"""

from collections.abc import Callable

import torch

from k3mesh.errors import ConfigError, Internal
from services.worker.model.batch import LocalExperts, Mode
from services.worker.parallel import low_latency, normal
from services.worker.parallel.group import Group

ROW_DTYPES = (torch.bfloat16, torch.float32)


class GlooExperts:
    """services.worker.model.batch.ExpertDispatcher of one rank; expert e lives on group rank e // num_local."""

    def __init__(self, group: Group, num_experts: int, capacity: int, shuffle: int | None = None):
        """`capacity` C: most rows a rank may bring to one low-latency call (--low-latency-max-num-tokens-per-gpu); a call
        moves C rows to every rank whatever it brings, so keep it near the largest round. `shuffle` seeds a permutation of
        the rows inside each expert on arrival, which DeepEP leaves undefined: results must not depend on it.
        """
        if num_experts % group.size:
            raise ConfigError(
                f"--expert-parallel-size {group.size}: must divide the model's {num_experts} experts",
                param="expert_parallel_size",
            )
        if capacity < 1 or group.size * capacity % 4:
            raise ConfigError(
                f"--low-latency-max-num-tokens-per-gpu {capacity}: must be positive, and a multiple of 4 "
                f"when multiplied by the {group.size} ranks",
                param="low_latency_max_num_tokens_per_gpu",
            )
        self.group = group
        self.num_experts = num_experts
        self.num_local = num_experts // group.size
        self.capacity = capacity
        self._permutation = None if shuffle is None else torch.Generator().manual_seed(shuffle)
        self._calls = 0

    def forward(
        self,
        mode: Mode,
        z: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: LocalExperts,
        overlap: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """z [s, H] bf16 or fp32, ids [s, k] int64 (-1: no expert), weights [s, k] fp32 (0 at -1) -> [s, H] of z's dtype.

        "extend" is normal mode, "decode" low latency with s <= capacity; a row's live ids are distinct. `overlap` runs while
        the rows travel. Internal: an argument breaks the contract, raised before anything is sent, so that the group stays
        usable; or the ranks' calls do not match. EngineLost.
        """
        self._check(mode, z, ids, weights, experts)
        self._calls += 1
        if mode == "extend":
            rows, handle = normal.dispatch(self.group, self.num_local, self._calls, z, ids, weights, overlap)
            return normal.combine(self.group, experts.routed(rows.x, rows.ids, rows.weights), handle)
        arrived, handle = low_latency.dispatch(
            self.group, self.num_local, self.capacity, self._calls, z, ids, overlap, self._permutation
        )
        most = self.group.size * self.capacity * min(ids.shape[1], self.num_local)
        return low_latency.combine(self.group, experts.grouped(arrived.x, arrived.counts, most), ids, weights, handle)

    def _check(self, mode: Mode, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: LocalExperts) -> None:
        """What DeepEP's host code asserts, and what its kernels take for granted."""

        def require(condition: bool, message: str) -> None:
            if not condition:
                raise Internal(f"expert dispatch: {message}")

        require(experts.num_local == self.num_local, f"{experts.num_local} local experts, the group needs {self.num_local}")
        require(z.dtype in ROW_DTYPES, f"z is {z.dtype}, must be one of {ROW_DTYPES}")
        require(ids.dtype == torch.int64 and weights.dtype == torch.float32, f"ids {ids.dtype}, weights {weights.dtype}")
        require(z.dim() == 2 and ids.dim() == 2, f"z {tuple(z.shape)} and ids {tuple(ids.shape)} must be [s, H] and [s, k]")
        require(
            z.shape[0] == ids.shape[0] and ids.shape == weights.shape,
            f"z {tuple(z.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)} disagree on rows or routes",
        )
        require(z.is_contiguous() and ids.is_contiguous() and weights.is_contiguous(), "z, ids and weights must be contiguous")
        require(
            mode == "extend" or z.shape[0] <= self.capacity,
            f"{z.shape[0]} rows exceed the low-latency capacity of {self.capacity}: "
            "raise --low-latency-max-num-tokens-per-gpu or bring fewer rows",
        )
        if ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            require(low >= -1 and high < self.num_experts, f"ids {low}..{high} leave -1..{self.num_experts - 1}")
            require(not bool(weights[ids < 0].any()), "a route to no expert (-1) carries a weight; it must be 0")
