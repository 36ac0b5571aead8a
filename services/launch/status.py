"""`k3mesh status`: what of a state directory's mesh runs, and where it listens."""

from typing import Any

import redis
from pydantic import Field
from redis.exceptions import RedisError

from services.contracts.flags import FlagSet
from services.launch.state import StateDir

EXIT_STOPPED = 3  # as `systemctl status` has it


class StatusArguments(FlagSet):
    """k3mesh status."""

    state_dir: str = Field(default=".state", description="directory that `k3mesh up` was given")


def main(argv: list[str]) -> int:
    """Return 0 if the mesh runs, 3 if not."""
    state = StateDir(StatusArguments.parse(argv, "k3mesh status").state_dir)
    supervisor = state.holder()
    if supervisor is None:
        print(f"no mesh runs in {state.path}")
        return EXIT_STOPPED
    addresses = state.addresses()
    print(f"supervisor  process {supervisor}, logs in {state.logs}")
    print(f"gateway     {addresses['url']}")
    print(f"redis       {addresses['redis']}")
    for engine_id, where in addresses.items():
        if isinstance(where, dict):
            beat = heartbeat(addresses["redis"], engine_id)
            print(f"{engine_id:<11} scheduler {where['scheduler']}, {len(where['workers'])} workers; {beat}")
    print(f"processes   {', '.join(f'{name} {pid}' for name, pid in state.processes().items())}")
    return 0


def heartbeat(redis_url: str, engine_id: str) -> str:
    """What is not zero of what the engine last wrote to k3:eng:ID, which is gone 10 s after its last beat."""
    try:
        client: Any = redis.Redis.from_url(redis_url, decode_responses=True, socket_connect_timeout=2, socket_timeout=2)
        with client:
            beat: dict[str, str] = client.hgetall(f"k3:eng:{engine_id}")
    except (RedisError, OSError) as error:
        return f"Redis does not answer ({error})"
    told = [f"{name} {value}" for name, value in sorted(beat.items()) if name != "at" and value != "0"]
    return ", ".join(told) or "no heartbeat"
