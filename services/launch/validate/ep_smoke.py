"""The expert dispatcher over several ranks of one node, against all experts on each rank; started by torchrun:

    TEST_DEEPEP_MODE=normal      torchrun --standalone --nproc-per-node 2 -m services.launch.validate.ep_smoke
    TEST_DEEPEP_MODE=low_latency torchrun --standalone --nproc-per-node 2 -m services.launch.validate.ep_smoke

Rank 0 prints one line of JSON. On GPUs, one for each rank, rows are bfloat16 at K3's widths; on a CPU small and float32.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from kernels.reference.experts import prepare_experts
from services.contracts.topology import Topology
from services.launch.ports import free_ports
from services.launch.validate.drawn import random_experts, relative_error
from services.worker.parallel.deepep import DeepEpExperts, open_buffer
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.group import Group
from services.worker.parallel.groups import Groups, join

MODES = {"normal": "extend", "low_latency": "decode"}
CAPACITY, START_S = 32, 60.0
WIDTHS = {"cuda": (3584, 3072, 28, 16), "cpu": (128, 64, 8, 4)}  # latent, inner, experts of a rank, routes
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
LIMITS = {"cuda": 1e-2, "cpu": 1e-5}  # bfloat16 rows are rounded on the way out and back
Case = tuple[str, Tensor, Tensor, Tensor]  # name; rows [s, H], ids [s, k], weights [s, k]


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mode = os.environ.get("TEST_DEEPEP_MODE", "normal")
    if mode not in MODES:
        print(f"error: TEST_DEEPEP_MODE={mode}: give one of {', '.join(MODES)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    kind = "cuda" if torch.cuda.device_count() >= world else "cpu"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    topology = Topology("decode", stages=1, dp_size=world, tp_size=1, ep_size=world, num_layers=1, partition=(1,))
    if kind == "cuda":
        torch.cuda.set_device(device)
    groups = join(topology, rank, _address(rank), nccl=device if kind == "cuda" else None)
    latent, inner, local, routes = WIDTHS[kind]
    packed = random_experts(world * local, latent, inner, device)
    everything = prepare_experts(*packed, 4.0, 25.0, torch.float32)
    w13, w13_scale, w2, w2_scale = (it[rank * local : (rank + 1) * local] for it in packed)
    mine = prepare_experts(w13, w13_scale, w2, w2_scale, 4.0, 25.0, torch.float32)
    dispatcher = _dispatcher(groups, mode, device)
    worst: dict[str, float] = {}
    for name, x, ids, weights in _cases(rank, world, latent, world * local, routes, device):
        wanted = everything.routed(x.float(), ids, weights)
        found = dispatcher.forward(MODES[mode], x, ids, weights, mine).float()  # type: ignore[arg-type]
        worst[name] = _largest(groups.ep, relative_error(found, wanted))
    passed = all(error <= LIMITS[kind] for error in worst.values())
    if rank == 0:
        told = {"mode": mode, "by": type(dispatcher).__name__, "ranks": world, "device": kind, "limit": LIMITS[kind]}
        print(json.dumps(told | {"errors": worst, "passed": passed}))
    groups.close()
    return int(not passed)


def _dispatcher(groups: Groups, mode: str, device: torch.device) -> GlooExperts | DeepEpExperts:
    """DeepEP on GPUs, as a worker has it."""
    latent, _, local, routes = WIDTHS[device.type]
    experts, low_latency, told = groups.ep.size * local, mode == "low_latency", count()
    if device.type == "cpu":
        return GlooExperts(groups.ep, experts, CAPACITY, shuffle=1)
    buffer = open_buffer(
        groups.ep,
        latent=latent,
        num_experts=experts,
        capacity=CAPACITY,
        low_latency=low_latency,
        gather=lambda value: groups.share(f"deepep-{next(told)}", value, groups.ep.ranks, START_S),
    )
    return DeepEpExperts(
        groups.ep, buffer, latent=latent, routes=routes, num_experts=experts, capacity=CAPACITY, low_latency=low_latency,
        device=device,
    )  # fmt: skip


def _address(rank: int) -> str:
    """Where the ranks meet, beside torchrun's own store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    if rank == 0:
        store.set("k3mesh", f"127.0.0.1:{free_ports(1)[0]}")
    return store.get("k3mesh").decode()


def _cases(rank: int, world: int, latent: int, experts: int, routes: int, device: torch.device) -> Iterator[Case]:
    """This rank's part of each."""
    drawn = torch.Generator(device).manual_seed(100 + rank)
    sizes = {
        "equal batches": [CAPACITY] * world,
        "unequal batches": [1 + 7 * n % CAPACITY for n in range(world)],
        "one rank alone": [0] * (world - 1) + [CAPACITY],
        "all to the last rank": [CAPACITY] * world,
        "padded rows": [CAPACITY] * world,
    }
    for name, counts in sizes.items():
        rows = max(1, counts[rank])  # a rank that brings nothing has one row of padding (spec moe-ep §1)
        x = torch.randn(rows, latent, generator=drawn, device=device).to(
            torch.bfloat16 if device.type == "cuda" else torch.float32
        )
        first = experts - experts // world if name == "all to the last rank" else 0
        ids = first + torch.rand(rows, experts - first, generator=drawn, device=device).argsort(-1)[:, :routes]
        weights = torch.rand(rows, routes, generator=drawn, device=device)
        gone = slice(1, None, 2) if name == "padded rows" else slice(counts[rank], None)
        ids[gone], weights[gone] = -1, 0.0
        yield name, x, ids.contiguous(), weights


def _largest(group: Group, value: float) -> float:
    """Of all ranks."""
    mine = torch.full((group.size, 1), value, dtype=torch.float64)
    found = torch.empty_like(mine)
    group.exchange(found, mine, [1] * group.size, [1] * group.size, "errors").wait()
    return float(found.max())


if __name__ == "__main__":
    sys.exit(main())
