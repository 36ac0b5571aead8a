"""A whole mesh on this machine: Redis, both engines, the gateway; from a named topology to groups of processes."""

import asyncio
import shlex
import shutil
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from k3mesh.errors import ConfigError
from services.contracts import argument_rules as rules
from services.contracts.arguments import GatewayArguments
from services.contracts.flags import refusal
from services.contracts.mesh import MeshArguments
from services.launch.child import Spec
from services.launch.engine import GATEWAY, REDIS, engine_specs, lay_out, ports_needed, python_spec
from services.launch.fits import check_engines, has_cuda
from services.launch.ports import free_ports, require_free
from services.launch.state import StateDir
from services.launch.supervisor import Group

LOOPBACK = "127.0.0.1"
STOP_MARGIN_S = 10.0
REDIS_CONF = """\
port 0
unixsocket "{socket}"
unixsocketperm 700
dir "{folder}"
appendonly yes
appendfsync everysec
save ""
daemonize no
supervised systemd
"""


class UpArguments(MeshArguments):
    """k3mesh up."""

    host: str = Field(default="127.0.0.1", description="address that the gateway's HTTP binds")
    port: int = Field(default=8000, ge=1, le=65535, description="HTTP port")
    state_dir: str = Field(default=".state", description="directory for logs, sockets and Redis files, of this mesh alone")
    gateway: str = Field(default="", description="more flags of the gateway, likewise")
    redis_url: str = Field(default="", description="a Redis that runs already; unset, the mesh starts its own")
    foreground: bool = Field(default=False, description="stay until SIGINT or SIGTERM instead of returning when ready")

    @model_validator(mode="after")
    def _absolute_state(self) -> Self:
        self.fill({"state_dir": str(Path(self.state_dir).resolve())})
        return self


class LocalMesh:
    """Everything that runs for one `k3mesh up`. Making one checks all that can be checked; it starts nothing."""

    def __init__(self, arguments: UpArguments):
        self.prefill, self.decode = arguments.engines()
        for engine in (self.prefill, self.decode):
            if engine.nnodes > 1:
                rule = f"{engine.engine_id} spans {engine.nnodes} nodes, and this starts one machine"
                raise refusal("topology", arguments.topology, rule, "run `k3mesh serve` on each node")
        check_engines((self.prefill, self.decode))
        for engine in (self.prefill, self.decode):
            rules.check_runnable(engine, has_cuda())
        self.url = f"http://{_literal(arguments.host)}:{arguments.port}"
        require_free(arguments.host, arguments.port)
        if not arguments.redis_url and shutil.which("redis-server") is None:
            raise ConfigError(
                "redis-server: is not installed; `apt-get install redis-server`, or give the --redis-url of one that runs",
                param="redis_url",
            )
        self._arguments = arguments
        self._gateway_spec("127.0.0.1:1", "unix://")  # refuses what is wrong in --gateway

    def groups(self, state: StateDir) -> list[list[Group]]:
        """Redis, then the engines, then the gateway. Finds free ports and writes ports.json."""
        redis_url = self._arguments.redis_url or f"unix://{state.run / 'redis.sock'}"
        engines = (self.prefill, self.decode)
        needed = sum(1 + ports_needed(engine.world_size) for engine in engines)
        ports = iter(free_ports(needed, spoken_for=self._arguments.port))
        p, d = (
            engine.model_copy(update={"redis_url": redis_url, "dist_init_addr": f"{LOOPBACK}:{next(ports)}"})
            for engine in engines
        )
        at_p, at_d = (lay_out([LOOPBACK], e.world_size, list(islice(ports, ports_needed(e.world_size)))) for e in (p, d))
        state.write_addresses({"url": self.url, "redis": redis_url, p.engine_id: asdict(at_p), d.engine_id: asdict(at_d)})

        gateway = self._gateway_spec(at_p.scheduler, redis_url)
        timeout = p.startup_timeout
        stages = [
            [
                Group(p.engine_id, engine_specs(p, at_p, state, at_d.scheduler), state, timeout),
                Group(d.engine_id, engine_specs(d, at_d, state, None), state, d.startup_timeout),
            ],
            [Group("gateway", [gateway], state, timeout)],
        ]
        return stages if self._arguments.redis_url else [[Group("redis", [redis_spec(state)], state, timeout)], *stages]

    def _gateway_spec(self, prefill_address: str, redis_url: str) -> Spec:
        """The API key goes by the environment: everyone may read a command line."""
        own = ["--host", self._arguments.host, "--port", str(self._arguments.port), "--prefill-address", prefill_address]
        served = ["--model", self.prefill.model, "--served-model-name", self.prefill.served_model_name]
        text = ["--tokenizer", self.prefill.tokenizer, "--redis-url", redis_url]
        gateway = GatewayArguments.parse([*own, *served, *text, *shlex.split(self._arguments.gateway)])
        return python_spec(
            "gateway",
            "services.gateway.main",
            gateway.model_copy(update={"api_key": None}).argv(),
            GATEWAY,
            gateway.shutdown_timeout + STOP_MARGIN_S,
            {"K3MESH_API_KEY": gateway.api_key} if gateway.api_key else {},
        )


def redis_spec(state: StateDir) -> Spec:
    """A redis-server on a Unix socket in the state directory. It speaks sd_notify itself, but no watchdog; setpriv ties it
    to our life."""
    config, path = state.redis / "redis.conf", state.run / "redis.sock"
    config.write_text(REDIS_CONF.format(socket=path, folder=state.redis))

    async def answers() -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(b"PING\r\n")
            await reader.readline()
        finally:
            writer.close()

    return Spec("redis", ("setpriv", "--pdeathsig", "KILL", "redis-server", str(config)), REDIS, probe=answers)


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host else host
