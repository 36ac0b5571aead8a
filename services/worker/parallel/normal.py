"""Normal mode: one copy of a row to each rank that holds one of its experts, counts exchanged on the host (spec moe-ep §3)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3mesh.errors import Internal
from services.worker.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Received:
    """m rows at their experts' rank, ordered by source rank, then by the source's row."""

    x: torch.Tensor  # [m, H]
    ids: torch.Tensor  # [m, k] int64 local, -1 where the expert lives elsewhere
    weights: torch.Tensor  # [m, k] float32, 0 at -1


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine needs of its dispatch. One use."""

    rows: int
    sent: tuple[torch.Tensor, ...]  # for each rank, the source rows that went there, ascending
    splits: list[int]
    received_splits: list[int]


def dispatch(
    group: Group,
    num_local: int,
    call: int,
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    overlap: Callable[[], None] | None,
) -> tuple[Received, Handle]:
    """Send z [s, H] to the ranks of ids [s, k]; `call` must be equal on all ranks."""
    owners = torch.where(ids < 0, -1, ids // num_local)
    sent = tuple((owners == rank).any(dim=1).nonzero().flatten() for rank in range(group.size))
    splits = [len(rows) for rows in sent]
    received_splits = _exchange_counts(group, call, splits)

    order = torch.cat(sent)
    frames = _pack(z[order], ids[order], weights[order])
    arrived = torch.empty(sum(received_splits), frames.shape[1], dtype=torch.uint8, device=z.device)
    pending = group.exchange(arrived, frames, received_splits, splits, "dispatch")
    if overlap is not None:
        overlap()
    pending.wait()

    x, routes, received_weights = _unpack(arrived, z, ids)
    first = group.rank * num_local
    local = torch.where((routes >= first) & (routes < first + num_local), routes - first, -1)
    received = Received(x, local, torch.where(local < 0, 0.0, received_weights))
    return received, Handle(z.shape[0], sent, splits, received_splits)


def combine(group: Group, y: torch.Tensor, handle: Handle) -> torch.Tensor:
    """y [m, H], weighted and summed over the rank's routes, in received order -> [s, H]: for each row the sum over ranks,
    ascending, in float32, rounded once; 0 for a row without a route."""
    back = torch.empty(sum(handle.splits), y.shape[1], dtype=y.dtype, device=y.device)
    group.exchange(back, y.contiguous(), handle.splits, handle.received_splits, "combine").wait()
    total = torch.zeros(handle.rows, y.shape[1], dtype=torch.float32, device=y.device)
    for rows, part in zip(handle.sent, back.split(handle.splits), strict=True):
        total[rows] += part.float()  # a row occurs once in a rank's part
    return total.to(y.dtype)


def _exchange_counts(group: Group, call: int, splits: list[int]) -> list[int]:
    """Rows that each rank will send here. The call's number travels along: ranks that run different plans must stop, not
    take each other's rows."""
    counts = torch.tensor([[count, call] for count in splits])
    arriving = torch.empty_like(counts)
    ones = [1] * group.size
    group.exchange(arriving, counts, ones, ones, "counts").wait()
    received: list[int] = []
    for rank, (count, their_call) in zip(group.ranks, arriving.tolist(), strict=True):
        if their_call != call:
            raise Internal(
                f"expert dispatch: rank {rank} is at call {their_call}, this rank at {call}: they run different steps"
            )
        received.append(count)
    return received


def _pack(z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One record a row: latent, ids, weights."""
    return torch.cat([ids.view(torch.uint8), weights.view(torch.uint8), z.view(torch.uint8)], dim=1)


def _unpack(records: torch.Tensor, z: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records of rows like z and ids -> latent, ids, weights."""
    topk = ids.shape[1]
    routes, weights, latent = records.split([8 * topk, 4 * topk, records.shape[1] - 12 * topk], dim=1)
    return (
        latent.contiguous().view(z.dtype),
        routes.contiguous().view(torch.int64),
        weights.contiguous().view(torch.float32),
    )
