"""A decode engine whose workers compute nothing, and whatever it needs around it, for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from k3mesh.client import Client
from k3mesh.v1 import request_pb2_grpc, transfer_pb2_grpc
from services.contracts.geometry import blocks_for, rows_ahead
from services.launch import up
from services.launch.bench.control_ends import IdleAgent, IdlePrefill
from services.launch.bench.idle_worker import VOCABULARY
from services.launch.bench.samples import cpu_seconds
from services.launch.child import Child
from services.launch.engine import GATEWAY, SCHEDULER, WORKER, lay_out, ports_needed, python_spec
from services.launch.mesh import redis_spec
from services.launch.ports import free_ports
from services.launch.state import StateDir
from services.launch.supervisor import Group
from services.launch.tokenizer_files import tokenizer_files
from services.runtime.rpc_server import RpcServer

LOOPBACK = "127.0.0.1"
START_S = 180.0
GRACE_S = 1.0
MODEL = "idle"
ROOM_TO_GROW = 3  # widths that a block table reaches beyond the context


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode engine and how its workers behave."""

    replicas: int = 4
    places: int = 32  # of one replica
    tp: int = 1
    width: int = 1  # of every round
    round_ms: float = 0.0
    max_model_len: int = 32768


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted up to one moment."""

    at: float
    rounds: int
    tokens: int
    planning_us: int
    events_us: int
    scheduler_cpu_s: float
    leader_cpu_s: float  # mean of the leaders
    busy_s: float  # in rounds, mean of the leaders


class ControlMesh:
    """The engine's processes; agents and prefill are played by this one."""

    def __init__(
        self, shape: Shape, prefill: str, scheduler: str, leaders: Sequence[str], children: dict[str, Child], url: str
    ):
        self.shape, self.prefill, self.url = shape, prefill, url
        self._scheduler, self._leaders, self._children = scheduler, leaders, children

    async def count(self, client: Client) -> Counts:
        at = asyncio.get_running_loop().time()
        totals = (await client.inspect("decode-scheduler", self._scheduler)).totals
        ranks = range(0, self.shape.replicas * self.shape.tp, self.shape.tp)
        workers = [(await client.inspect("worker", leader)).totals for leader in self._leaders]
        return Counts(
            at=at,
            rounds=totals["rounds"],
            tokens=totals["tokens"],
            planning_us=totals["planning_us"],
            events_us=totals["events_us"],
            scheduler_cpu_s=self._cpu("decode-0.scheduler"),
            leader_cpu_s=sum(self._cpu(f"decode-0.worker-{rank}") for rank in ranks) / len(ranks),
            busy_s=sum(worker["busy_us"] for worker in workers) / len(workers) / 1e6,
        )

    def _cpu(self, name: str) -> float:
        pid = self._children[name].pid
        assert pid is not None
        return cpu_seconds(pid)


@asynccontextmanager
async def running(folder: Path, shape: Shape, *, gateway: bool = False) -> AsyncIterator[ControlMesh]:
    """The engine, paired and ready; with `gateway` also the HTTP door. ChildFailed if a process does not come up."""
    state = StateDir(folder)
    state.create()
    world = shape.replicas * shape.tp
    ports = iter(free_ports(ports_needed(world) + 3))
    addresses = lay_out([LOOPBACK], world, list(islice(ports, ports_needed(world))))
    prefill_address, meeting, http_port = f"{LOOPBACK}:{next(ports)}", f"{LOOPBACK}:{next(ports)}", next(ports)
    redis_url = f"unix://{state.run / 'redis.sock'}"
    prefill = IdlePrefill(MODEL, shape.max_model_len, shape.width, shape.tp)
    async with AsyncExitStack() as stack:
        agents = [
            RpcServer(address, [_registration(transfer_pb2_grpc.add_TransferControlServicer_to_server, agent)])
            for rank, address in enumerate(addresses.agents)
            for agent in [IdleAgent("decode-0", rank, shape.width)]
        ]
        door = RpcServer(prefill_address, [_registration(request_pb2_grpc.add_PrefillSchedulerServicer_to_server, prefill)])
        for server in (*agents, door):
            await server.start()
            stack.push_async_callback(server.stop, GRACE_S)
        flags = _engine_flags(shape, redis_url, meeting)
        groups = [
            Group("redis", [redis_spec(state)], state, START_S),
            Group("decode-0", _specs(shape, flags, addresses, state), state, START_S),
        ]
        if gateway:
            groups.append(Group("gateway", [_gateway_spec(folder, redis_url, prefill_address, http_port)], state, START_S))
        for group in groups[:2]:
            stack.push_async_callback(group.kill)
            await group.start()
        stack.push_async_callback(prefill.close)
        await prefill.pair(addresses.scheduler)
        hearing = asyncio.ensure_future(prefill.hear())
        stack.callback(hearing.cancel)
        url = f"http://{LOOPBACK}:{http_port}"
        for group in groups[2:]:
            stack.push_async_callback(group.kill)
            await group.start()
            await up.healthy(url)
        children = {child.name: child for group in groups for child in group.children}
        yield ControlMesh(shape, prefill_address, addresses.scheduler, addresses.workers[:: shape.tp], children, url)


def _registration(add: Any, servicer: Any) -> Any:
    return add, servicer, f"k3mesh.v1.{type(servicer).__mro__[1].__name__.removesuffix('Servicer')}"


def _engine_flags(shape: Shape, redis_url: str, meeting: str) -> list[str]:
    blocks = blocks_for(shape.max_model_len + ROOM_TO_GROW * rows_ahead(shape.width))
    speculation = ["--speculative-algorithm", "MTP", "--speculative-num-draft-tokens", str(shape.width)]
    flags = {
        "model": MODEL, "disaggregation-mode": "decode", "attn-tp-size": shape.tp, "data-parallel-size": shape.replicas,
        "max-num-seqs": shape.places * shape.replicas, "max-model-len": shape.max_model_len,
        "num-blocks": shape.places * blocks + 1, "num-slots": shape.places + 1, "redis-url": redis_url,
        "dist-init-addr": meeting, "startup-timeout": START_S,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, *(speculation if shape.width > 1 else []), "--no-speculative-adaptive"]


def _specs(shape: Shape, flags: list[str], addresses: Any, state: StateDir) -> list[Any]:
    specs: list[Any] = []
    for rank, listen in enumerate(addresses.workers):
        own = ["--rank", str(rank), "--listen", listen, "--agent-socket", "none", "--run-dir", str(state.run)]
        own += ["--round-ms", str(shape.round_ms)]
        specs.append(python_spec(f"decode-0.worker-{rank}", "services.launch.bench.idle_worker", [*flags, *own], WORKER))
    scheduler = ["--listen", addresses.scheduler, "--agents", ",".join(addresses.agents)]
    scheduler += ["--workers", ",".join(addresses.workers[:: shape.tp])]
    return [*specs, python_spec("decode-0.scheduler", "services.scheduler.decode.main", [*flags, *scheduler], SCHEDULER)]


def _gateway_spec(folder: Path, redis_url: str, prefill_address: str, port: int) -> Any:
    text = folder / "tokenizer"
    text.mkdir()
    for name, content in tokenizer_files(VOCABULARY).items():
        (text / name).write_bytes(content)
    flags = {
        "model": text, "served-model-name": MODEL, "tokenizer": text, "redis-url": redis_url,
        "prefill-address": prefill_address, "port": port,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return python_spec("gateway", "services.gateway.main", words, GATEWAY)
