"""The expert dispatcher over DeepEP's legacy Buffer, in both modes (spec moe-ep §2 to §6).

The buffer is made once, by all ranks of the group, before memory is measured. Low latency then asks the installed build, on
every rank, for rows of the model's latent width with all of its routes (`native`); where it has not been compiled for them,
rows are padded to the next width that it knows and the routes go in two halves, one after the other (`split-pad`).

Low latency's buffers take turns at each call, which a captured graph freezes: a layer's calls are two, or four, so a round
always makes an even number of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from k3mesh.errors import ConfigError, EngineLost, Internal
from services.contracts.buffers import KERNEL_HIDDEN
from services.runtime.telemetry import log
from services.worker.model.batch import LocalExperts, Mode
from services.worker.parallel.group import Group

BF16_BYTES = 2
QUEUE_PAIRS = 20  # at least; low latency wants one for each local expert
PACKAGE = "tokenspeed-deepep==1.2.1.post20251110"


class Buffer(Protocol):
    """What is used of deep_ep.Buffer."""

    def get_dispatch_layout(self, ids: Tensor, num_experts: int) -> tuple[Any, ...]: ...
    def dispatch(self, x: Tensor, **options: Any) -> tuple[Any, ...]: ...
    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]: ...
    def low_latency_dispatch(self, x: Tensor, ids: Tensor, rows: int, experts: int, **options: Any) -> tuple[Any, ...]: ...
    def low_latency_combine(self, x: Tensor, ids: Tensor, weights: Tensor, handle: Any, **options: Any) -> tuple[Any, ...]: ...
    def clean_low_latency_buffer(self, rows: int, hidden: int, experts: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How low latency carries a row: its width there, and in how many parts its routes go."""

    width: int
    passes: int

    @property
    def name(self) -> str:
        return "native" if self.passes == 1 else "split-pad"


class DeepEpExperts:
    """services.worker.model.batch.ExpertDispatcher of one rank; expert e lives on group rank e // num_local."""

    def __init__(
        self,
        group: Group,
        buffer: Buffer,
        *,
        latent: int,
        routes: int,
        num_experts: int,
        capacity: int,
        low_latency: bool,
        device: torch.device,
        widths: Sequence[int] = KERNEL_HIDDEN,
    ):
        """`capacity` C: most rows that a rank brings to one low-latency call, one constant for all calls. Collective: it probes
        where there is to be low latency. ConfigError if the build can carry the rows in neither way."""
        self.group, self._buffer = group, buffer
        self.num_local = num_experts // group.size
        self._num_experts, self._capacity, self._latent = num_experts, capacity, latent
        self._layout: Layout | None = None
        if low_latency:
            self._layout = self._probe(layouts(latent, routes, widths), routes, device)
            buffer.clean_low_latency_buffer(capacity, self._layout.width, num_experts)
            log.info("DeepEP low latency", layout=self._layout.name, width=self._layout.width, passes=self._layout.passes)

    def forward(
        self,
        mode: Mode,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: LocalExperts,
        overlap: Callable[[], None] | None = None,
    ) -> Tensor:
        """As ExpertDispatcher.forward, z bfloat16. Internal if the rows are more than low latency was given room for."""
        if mode == "extend":
            return self._normal(z, ids, weights, experts, overlap)
        if self._layout is None or z.shape[0] > self._capacity:
            capacity = 0 if self._layout is None else self._capacity
            raise Internal(
                f"expert dispatch: {z.shape[0]} rows for a low-latency capacity of {capacity}; raise "
                "--low-latency-max-num-tokens-per-gpu, and give --deepep-mode auto on decode"
            )
        return self._low_latency(self._layout, z, ids, weights, experts, overlap)

    def _normal(
        self, z: Tensor, ids: Tensor, weights: Tensor, experts: LocalExperts, overlap: Callable[[], None] | None
    ) -> Tensor:
        """A row travels once to each rank that has one of its experts; the host waits for the counts."""
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._num_experts)
        if overlap is not None:
            overlap()  # queued before the host waits
        x, local, received_weights, _, handle, _ = self._buffer.dispatch(
            z,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        return self._buffer.combine(experts.routed(x, local, received_weights), handle)[0]

    def _low_latency(
        self,
        layout: Layout,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: LocalExperts,
        overlap: Callable[[], None] | None,
    ) -> Tensor:
        """A row travels once for each route; weights are applied where it came from."""
        rows = _padded(z, layout.width)
        parts = zip(ids.chunk(layout.passes, dim=1), weights.chunk(layout.passes, dim=1), strict=True)
        sums: list[Tensor] = []
        for part_ids, part_weights in parts:
            part_ids, part_weights = part_ids.contiguous(), part_weights.contiguous()
            received, counts, handle, _, arrive = self._buffer.low_latency_dispatch(
                rows, part_ids, self._capacity, self._num_experts, use_fp8=False, return_recv_hook=True
            )
            if overlap is not None:
                overlap()  # while the rows travel
                overlap = None
            arrive()
            most = self.group.size * self._capacity * min(part_ids.shape[1], self.num_local)
            outputs = _padded(experts.grouped(received[..., : self._latent], counts, most), layout.width)
            combined, _, arrive = self._buffer.low_latency_combine(
                outputs, part_ids, part_weights, handle, return_recv_hook=True
            )
            arrive()
            sums.append(combined[:, : self._latent])
        return sums[0] if len(sums) == 1 else (sums[0].float() + sums[1].float()).to(z.dtype)

    def _probe(self, candidates: Sequence[Layout], routes: int, device: torch.device) -> Layout:
        """The first that every rank's build carries: one row to nobody, there and back."""
        reasons: list[str] = []
        for layout in candidates:
            ids = torch.full((1, routes // layout.passes), -1, dtype=torch.int64, device=device)
            x = torch.zeros((1, layout.width), dtype=torch.bfloat16, device=device)
            reason = ""
            try:
                received, _, handle, _, arrive = self._buffer.low_latency_dispatch(
                    x, ids, self._capacity, self._num_experts, use_fp8=False, return_recv_hook=True
                )
                arrive()
                self._buffer.low_latency_combine(received, ids, ids.float() * 0, handle, return_recv_hook=True)[2]()
            except (RuntimeError, AssertionError) as error:  # a host-side assertion: nothing was sent
                reason = str(error).partition("\n")[0]
            if not self._anybody(bool(reason)):
                return layout
            reasons.append(
                f"{layout.name} ({layout.width} wide, {routes // layout.passes} routes): {reason or 'on another rank'}"
            )
        raise ConfigError(
            f"--all2all-backend deepep: the installed build carries no rows of {self._latent} with {routes} routes in low "
            f"latency; {'; '.join(reasons)}",
            param="all2all_backend",
        )

    def _anybody(self, fails: bool) -> bool:
        mine = torch.full((self.group.size, 1), int(fails))
        told = torch.empty_like(mine)
        self.group.exchange(told, mine, [1] * self.group.size, [1] * self.group.size, "probe").wait()
        return bool(told.any())


def layouts(latent: int, routes: int, widths: Sequence[int]) -> list[Layout]:
    """In the order of preference; without a wider row or an even number of routes there is no second."""
    wider = [width for width in widths if width >= latent]
    return [Layout(latent, 1), *([Layout(min(wider), 2)] if wider and routes % 2 == 0 else [])]


def open_buffer(
    group: Group, *, latent: int, num_experts: int, capacity: int, low_latency: bool, gather: Callable[[Any], list[Any]]
) -> Buffer:
    """deep_ep.Buffer over the group's ranks, sized for both modes; `gather` brings each rank's start-up value to all of them.
    It goes with the process: destroying it waits for peers, who may be gone. ConfigError where the package is not."""
    try:
        package: Any = import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            f"--all2all-backend deepep: deep_ep cannot be loaded ({error}); pip install {PACKAGE}, with NCCL's and NVSHMEM's "
            "libraries on the loader's path",
            param="all2all_backend",
        ) from None
    nvlink = rdma = 0
    row_bytes = latent * BF16_BYTES
    for config in (package.Buffer.get_dispatch_config(group.size), package.Buffer.get_combine_config(group.size)):
        nvlink = max(nvlink, config.get_nvl_buffer_size_hint(row_bytes, group.size))
        rdma = max(rdma, config.get_rdma_buffer_size_hint(row_bytes, group.size))
    if low_latency:
        width = min((it for it in KERNEL_HIDDEN if it >= latent), default=latent)
        hint = package.Buffer.get_low_latency_rdma_size_hint
        rdma = max(rdma, hint(capacity, width, group.size, num_experts))
    try:
        return package.Buffer(
            None,
            nvlink,
            rdma,
            low_latency_mode=low_latency,
            num_qps_per_rank=max(QUEUE_PAIRS, num_experts // group.size),
            explicitly_destroy=True,
            comm=_Ranks(group.rank, group.size, gather),
        )
    except RuntimeError as error:
        raise EngineLost(f"DeepEP's buffers cannot be made on rank {group.ranks[group.rank]}: {error}") from error


class _Ranks:
    """The group as DeepEP asks for it, in the words of MPI."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]):
        self._rank, self._size, self.allgather = rank, size, gather

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size


def _padded(rows: Tensor, width: int) -> Tensor:
    """Zeros behind each row, as far as `width`."""
    return rows if rows.shape[-1] == width else F.pad(rows, (0, width - rows.shape[-1]))
