"""Rank start: meet the engine's other ranks at --dist-init-addr, agree on the epoch, make the groups.

    groups = join(topology, rank, "10.0.0.1:29500", startup_timeout=600.0)
    groups.epoch       int, nanoseconds, drawn by rank 0 at this start; equal on every rank of the engine
    groups.tp          GlooTensorParallel or NcclTensorParallel: the attention-TP group (model.batch.TensorParallel)
    groups.ep          Group: experts.GlooExperts(groups.ep, num_experts, capacity) is the ExpertDispatcher
    groups.pipeline    Pipeline: send_next(*tensors), recv_prev(*outs), flush()
    groups.close()

Every call may block: use the device thread. A collective that ends early (a peer died, its deadline passed) is EngineLost,
after which the groups are of no more use: the engine restarts as a whole, with a new epoch.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, DistNetworkError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from k3mesh.errors import ConfigError, EngineLost
from services.contracts.topology import Topology
from services.worker.parallel.collectives import GlooTensorParallel
from services.worker.parallel.group import Group
from services.worker.parallel.nccl import NcclGroup, NcclTensorParallel
from services.worker.parallel.pipeline import Pipeline

COLLECTIVE_TIMEOUT_S = 60.0  # spec moe-ep §9


@dataclass(frozen=True)
class Groups:
    """One rank's groups. `store` lives as long as they do: rank 0 serves it to the others."""

    epoch: int
    tp: GlooTensorParallel | NcclTensorParallel
    ep: Group
    pipeline: Pipeline
    stages: Group
    store: Store | None
    rank: int
    world_size: int

    def share(self, what: str, value: int | bytes | bytearray | None, ranks: Sequence[int], seconds: float) -> list[Any]:
        """What each of `ranks` says, in their order; the same kind of value comes back, bytes as bytearray. Once for each
        `what`. EngineLost if one does not within so many seconds."""
        assert self.store is not None, "a rank alone shares nothing"
        kind = b"n" if value is None else b"i" if isinstance(value, int) else b"b"
        content = b"" if value is None else str(value).encode() if isinstance(value, int) else bytes(value)
        self.store.set(f"{what}-{self.rank}", (kind + content).hex())
        keys = [f"{what}-{peer}" for peer in ranks]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
            told = [bytes.fromhex(self.store.get(key).decode()) for key in keys]
        except DistError as error:
            raise EngineLost(f"{_missing(self.store, keys)} did not tell its {what} within {seconds:g} s") from error
        read = {ord("n"): lambda it: None, ord("i"): lambda it: int(it), ord("b"): lambda it: bytearray(it)}
        return [read[it[0]](it[1:]) for it in told]

    def least(self, what: str, value: int, seconds: float) -> int:
        """The smallest that any rank of the engine says, each once. EngineLost if one does not within so many seconds."""
        return value if self.store is None else min(self.share(what, value, range(self.world_size), seconds))

    def close(self) -> None:
        for group in (self.tp.group, self.ep, self.stages):
            group.close()


def join(
    topology: Topology,
    rank: int,
    dist_init_addr: str,
    startup_timeout: float = COLLECTIVE_TIMEOUT_S,
    timeout: float = COLLECTIVE_TIMEOUT_S,
    nccl: torch.device | None = None,
) -> Groups:
    """Meet all ranks of `topology` within `startup_timeout` seconds; `timeout` bounds each later collective. `nccl`: this
    rank's GPU, which no other rank of the engine has; without it groups are over gloo.

    ConfigError: the address is no host:port or is taken, the rank does not exist, ranks were started with different
    shapes. EngineLost: a rank did not arrive. A world of one opens no socket.
    """
    if not 0 <= rank < topology.world_size:
        raise ConfigError(f"--rank {rank}: the engine has ranks 0..{topology.world_size - 1}", param="rank")
    if topology.world_size == 1:
        store, hostname, epoch = None, "", time.time_ns()
    else:
        host, port = _address(dist_init_addr)
        hostname = _own_address_towards(host, port)
        store = _open_store(rank, host, port, startup_timeout)
        epoch = _meet(store, topology, rank, dist_init_addr, startup_timeout)

    def group(kind: str, ranks: list[int]) -> Group:
        shared = PrefixStore(f"{kind}-{ranks[0]}", store) if store is not None and len(ranks) > 1 else None
        if nccl is not None:
            return NcclGroup(kind, ranks, rank, shared, hostname, timeout, nccl)
        return Group(kind, ranks, rank, shared, hostname, timeout)

    place = topology.place_of(rank)
    stages = group("stages", [topology.rank_of(stage, place.dp, place.tp) for stage in range(topology.stages)])
    attention = group("tp", topology.tp_group(rank))
    tp = NcclTensorParallel(attention) if isinstance(attention, NcclGroup) else GlooTensorParallel(attention)
    ep = group("ep", topology.ep_group(rank))
    return Groups(epoch, tp, ep, Pipeline(stages), stages, store, rank, topology.world_size)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--dist-init-addr {text!r}: must be host:port of the node with rank 0", param="dist_init_addr")
    return host.strip("[]"), int(port)


def _own_address_towards(host: str, port: int) -> str:
    """This node's address on the network that reaches rank 0; a UDP connect asks the routing table and sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr {host}:{port}: {error}; name the node with rank 0 as this node can reach it",
            param="dist_init_addr",
        ) from error


def _open_store(rank: int, host: str, port: int, seconds: float) -> TCPStore:
    """Rank 0 serves the store, the others connect to it."""
    try:
        return TCPStore(
            host, port, is_master=rank == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )  # fmt: skip
    except DistNetworkError as error:
        if rank == 0:
            raise ConfigError(
                f"--dist-init-addr {host}:{port}: rank 0 cannot listen there ({_first_line(error)}); choose a free port",
                param="dist_init_addr",
            ) from error
        raise EngineLost(
            f"rank 0 does not answer at --dist-init-addr {host}:{port} within {seconds:g} s ({_first_line(error)})"
        ) from error


def _meet(store: Store, topology: Topology, rank: int, address: str, seconds: float) -> int:
    """Wait for every rank, check that all were started with one shape, and read rank 0's epoch."""
    if store.add(f"arrivals-{rank}", 1) > 1:
        raise EngineLost(
            f"another process is rank {rank} of the engine at {address}: "
            f"an old one that has not ended yet, or a second one with --rank {rank}"
        )
    if rank == 0:
        store.set("epoch", str(time.time_ns()))
    store.set(f"shape-{rank}", repr(topology))
    keys = [f"shape-{peer}" for peer in range(topology.world_size)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
        shapes = [store.get(key).decode() for key in keys]
        epoch = int(store.get("epoch"))
    except DistError as error:
        raise EngineLost(
            f"{_missing(store, keys)} did not arrive at {address} within {seconds:g} s of rank {rank}; its log says why"
        ) from error
    for peer, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ConfigError(
                f"rank {peer} was started as {shape}, rank 0 as {shapes[0]}: give every rank of an engine the same arguments"
            )
    return epoch


def _missing(store: Store, keys: list[str]) -> str:
    try:
        absent = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
    except DistError:
        return "rank 0, which serves the store,"
    return f"rank {', '.join(absent)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
