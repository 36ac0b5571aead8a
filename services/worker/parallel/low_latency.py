"""Low latency: one copy of a row for each expert, in buffers of fixed shape (spec moe-ep §4).

Two all-to-alls a layer. There: every rank sends one frame of the same size to each rank, `capacity` row records of latent
and ids, so that nobody has to learn a count first: an exchange of counts would be a third all-to-all, and at these sizes
a call costs its latency, not its bytes. Back: one row for each route; both sides know from the ids how many.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3mesh.errors import Internal
from services.worker.parallel.group import Group

HEADER = 16  # bytes of a frame's header: call number, rows


@dataclass(frozen=True, slots=True)
class Received:
    """Rows at their experts; beyond counts[e] the buffer is poisoned, as DeepEP's is undefined there."""

    x: torch.Tensor  # [E_l, most rows of an expert, H]: no longer than needed, for on a CPU its length costs
    counts: torch.Tensor  # [E_l] int32


@dataclass(frozen=True, slots=True)
class Handle:
    """The routes that arrived, by source rank, then source row, then k."""

    source: torch.Tensor  # [n] group rank
    row: torch.Tensor  # [n] row of the source
    expert: torch.Tensor  # [n] local expert
    position: torch.Tensor  # [n] the expert's buffer row


def dispatch(
    group: Group,
    num_local: int,
    capacity: int,
    call: int,
    z: torch.Tensor,
    ids: torch.Tensor,
    overlap: Callable[[], None] | None,
    permutation: torch.Generator | None,
) -> tuple[Received, Handle]:
    """Send z [s, H] to the experts ids [s, k]; `call` must be equal on all ranks. Rows of one source are contiguous in an
    expert's buffer; with `permutation` neither the sources nor their rows are in order."""
    frames = _frame(capacity, call, z, ids).repeat(group.size, 1)
    arrived = torch.empty_like(frames)
    ones = [1] * group.size
    pending = group.exchange(arrived, frames, ones, ones, "low-latency dispatch")
    if overlap is not None:
        overlap()
    pending.wait()

    latent, routes = _open(group, capacity, call, arrived, z, ids)
    local = routes - group.rank * num_local
    source, row, k = ((local >= 0) & (local < num_local)).nonzero(as_tuple=True)
    expert = local[source, row, k]
    counts = torch.bincount(expert, minlength=num_local)
    position = _positions(expert, source, counts, group.size, permutation)
    x = torch.full((num_local, int(counts.max()), z.shape[1]), torch.nan, dtype=z.dtype, device=z.device)
    x[expert, position] = latent[source, row]
    return Received(x, counts.int()), Handle(source, row, expert, position)


def combine(group: Group, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Handle) -> torch.Tensor:
    """y [E_l, rows, H] unweighted, rows in place; ids and weights [s, k] as at dispatch -> [s, H] = sum over k, ascending,
    of weight * y in float32, rounded once; 0 for a row without a route."""
    owners = torch.where(ids < 0, -1, ids // y.shape[0])
    routes = [(owners == rank).nonzero() for rank in range(group.size)]  # by owner, then row, then k: as the owner has them
    back = torch.empty(sum(len(part) for part in routes), y.shape[2], dtype=y.dtype, device=y.device)
    sent = torch.bincount(handle.source, minlength=group.size).tolist()
    group.exchange(
        back, y[handle.expert, handle.position], [len(part) for part in routes], sent, "low-latency combine"
    ).wait()  # fmt: skip

    row, k = torch.cat(routes).unbind(1)
    outputs = torch.zeros(*ids.shape, y.shape[2], device=y.device)
    outputs[row, k] = back.float()
    total = torch.zeros(ids.shape[0], y.shape[2], device=y.device)
    for j in range(ids.shape[1]):
        total += weights[:, j, None] * outputs[:, j]
    return total.to(y.dtype)


def _frame(capacity: int, call: int, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[1, bytes]: header, C rows of ids, C rows of latent; only the first s of each are filled."""
    rows = z.shape[0]
    id_bytes, latent_bytes = 8 * ids.shape[1], z.element_size() * z.shape[1]
    frame = torch.zeros(1, HEADER + capacity * (id_bytes + latent_bytes), dtype=torch.uint8, device=z.device)
    head, routes, latent = frame[0].split([HEADER, capacity * id_bytes, capacity * latent_bytes])
    head.copy_(torch.tensor([call, rows]).view(torch.uint8))
    routes.view(capacity, id_bytes)[:rows] = ids.view(torch.uint8)
    latent.view(capacity, latent_bytes)[:rows] = z.view(torch.uint8)
    return frame


def _open(
    group: Group, capacity: int, call: int, frames: torch.Tensor, z: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """R frames -> latent [R, C, H], ids [R, C, k] with -1 in unused rows."""
    id_bytes, latent_bytes = capacity * 8 * ids.shape[1], capacity * z.element_size() * z.shape[1]
    heads, routes, latent = frames.split([HEADER, id_bytes, latent_bytes], dim=1)
    ids_of = routes.contiguous().view(torch.int64).view(group.size, capacity, ids.shape[1])
    for index, (their_call, rows) in enumerate(heads.contiguous().view(torch.int64).tolist()):
        if their_call != call:
            raise Internal(
                f"expert dispatch: rank {group.ranks[index]} is at call {their_call}, this rank at {call}: "
                "they run different rounds"
            )
        ids_of[index, rows:] = -1
    return latent.contiguous().view(z.dtype).view(group.size, capacity, z.shape[1]), ids_of


def _positions(
    expert: torch.Tensor, source: torch.Tensor, counts: torch.Tensor, size: int, permutation: torch.Generator | None
) -> torch.Tensor:
    """Buffer row of each route inside its expert; the routes come by source, then row."""
    if permutation is None:
        order = torch.argsort(expert, stable=True)
    else:
        order = torch.randperm(len(expert), generator=permutation)
        order = order[torch.argsort(torch.randperm(size, generator=permutation)[source[order]], stable=True)]
        order = order[torch.argsort(expert[order], stable=True)]
    starts = torch.cumsum(counts, dim=0) - counts
    positions = torch.empty_like(expert)
    positions[order] = torch.arange(len(expert), device=expert.device) - starts[expert[order]]
    return positions
