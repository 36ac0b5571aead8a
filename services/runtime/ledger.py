"""The journal in Redis: request states and their log, engine heartbeats, scheduler leases (spec scheduling §5).

    k3:req:ID        hash    state, ver, owner, attempt, room, ... ; kept 1 h after the end
    k3:req:ID:log    stream  one entry a transition, with its figures
    k3:live:ENGINE   set     requests that this engine owns now
    k3:eng:ENGINE    hash    heartbeat of an engine, gone 10 s after its last
    k3:lease:ROLE    string  the one active scheduler of a role; k3:fence:ROLE counts its holders
    k3:cancel        stream  `XADD k3:cancel '*' request_id ID` cancels a request

Redis is directory and journal and never owns memory: writes are queued and survive an outage of Redis, and a state is
never read back to decide anything.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from k3mesh.errors import ConfigError, EngineLost
from services.contracts.lifecycle import TERMINAL, State
from services.runtime.telemetry import log

TTL_ENDED, TTL_LIVE = 3600, 86_400  # seconds
LEASE_MS, ENGINE_TTL_S = 10_000, 10
BEATS_PER_LEASE = 3
QUEUE_LIMIT, LOG_LENGTH = 10_000, 64
VERSIONS_PER_ATTEMPT = 1_000_000
Value = str | int | float

# Two owners write one request and may be reordered: the highest version is the state, an ended request stays ended, and
# the log takes every entry (see services/contracts/lifecycle.py). KEYS: hash, log. ARGV: id, state, version, owner,
# ended, time, live ttl, ended ttl, log length, then field, value, ...
TRANSITION = """
local before = redis.call('HMGET', KEYS[1], 'ver', 'ended', 'owner')
local entry = {'state', ARGV[2], 'owner', ARGV[4], 'at', ARGV[6]}
for i = 10, #ARGV do entry[#entry + 1] = ARGV[i] end
local late = before[2] == '1' or (before[1] and tonumber(before[1]) >= tonumber(ARGV[3]) and ARGV[5] == '0')
if late then entry[#entry + 1] = 'late'; entry[#entry + 1] = '1' end
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[9], '*', unpack(entry))
if not late then
  redis.call('HSET', KEYS[1], 'state', ARGV[2], 'ver', ARGV[3], 'owner', ARGV[4], 'ended', ARGV[5], 'at', ARGV[6])
  if before[3] and before[3] ~= ARGV[4] then redis.call('SREM', 'k3:live:' .. before[3], ARGV[1]) end
  if ARGV[5] == '1' then redis.call('SREM', 'k3:live:' .. ARGV[4], ARGV[1])
  else redis.call('SADD', 'k3:live:' .. ARGV[4], ARGV[1]) end
end
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
local ttl = ARGV[7]
if ARGV[5] == '1' or before[2] == '1' then ttl = ARGV[8] end
redis.call('EXPIRE', KEYS[1], ttl)
redis.call('EXPIRE', KEYS[2], ttl)
return late and 0 or 1
"""
RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(slots=True)
class _Write:
    request_id: str
    state: State
    version: int
    at: float
    owner: str
    fields: dict[str, Value] = field(default_factory=dict[str, Value])


class Ledger:
    """One service's pen. `owner` is the engine or gateway id that stands in the keys."""

    def __init__(self, redis_url: str, owner: str, lease_ms: int = LEASE_MS):
        self.owner = owner
        self.available = False
        self._url = redis_url
        self._lease_ms = lease_ms
        self._instance = uuid.uuid4().hex
        self._redis = redis.asyncio.from_url(redis_url, socket_connect_timeout=2, socket_timeout=5, decode_responses=True)
        self._transition = self._redis.register_script(TRANSITION)
        self._writes: deque[_Write] = deque()
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._lease: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.lease_lost = asyncio.Event()

    async def connect(self) -> None:
        """ConfigError if Redis does not answer. Requests that an earlier life of this owner left open are failed."""
        try:
            await self._redis.ping()
            left: Any = await self._redis.smembers(f"k3:live:{self.owner}")
        except (RedisError, OSError) as error:
            raise ConfigError(
                f"--redis-url {self._url}: Redis does not answer ({error}); start it, or correct the address", param="redis_url"
            ) from error
        self.available = True
        self._tasks.append(asyncio.ensure_future(self._write_on()))
        for request_id in left:
            reason = f"{self.owner} restarted and holds nothing of this request"
            self.transition(request_id, State.FAILED, VERSIONS_PER_ATTEMPT, 0, error="engine_lost", message=reason)

    def transition(self, request_id: str, state: State, attempt: int, step: int, owner: str = "", /, **fields: Value) -> None:
        """Note that the request is now in `state`. Never blocks; written in order, later if Redis is away.

        `step` orders the states of one attempt (lifecycle.RANK). `owner` has the request from now on, we if it is empty.
        `fields` join the log entry and the request's hash.
        """
        if len(self._writes) >= QUEUE_LIMIT:
            self._drop_superseded()
        version = attempt * VERSIONS_PER_ATTEMPT + step
        self._writes.append(_Write(request_id, state, version, time.time(), owner or self.owner, fields))
        self._written.clear()
        self._wake.set()

    async def lease(self, role: str) -> int:
        """Become the one active scheduler of `role`; waits for a dead holder's lease to run out. -> fencing token.

        ConfigError if another holder keeps renewing. `lease_lost` is set if another takes it later.
        """
        key = f"k3:lease:{role}"
        try:
            for _ in range(2):
                if await self._redis.set(key, self._instance, nx=True, px=self._lease_ms):
                    break
                await asyncio.sleep(max(0, await self._redis.pttl(key)) / 1000 + 0.05)
            else:
                if not await self._redis.set(key, self._instance, nx=True, px=self._lease_ms):
                    raise ConfigError(
                        f"another {role} scheduler is active on {self._url}; stop it, or use another Redis database"
                    )
            fence = int(await self._redis.incr(f"k3:fence:{role}"))
        except (RedisError, OSError) as error:
            raise EngineLost(f"Redis at {self._url} failed while taking the lease of {role}: {error}") from error
        self._lease = key
        return fence

    def keep(self, describe: Callable[[], dict[str, Value]]) -> None:
        """From now on renew the lease and refresh k3:eng:OWNER with what `describe` says."""
        self._tasks.append(asyncio.ensure_future(self._beat(describe)))

    async def cancels(self) -> AsyncIterator[str]:
        """Request ids that people put on k3:cancel, as they come; what comes during an outage of Redis is not missed."""
        reader = redis.asyncio.from_url(self._url, socket_connect_timeout=2, socket_timeout=None, decode_responses=True)
        last: str | None = None  # the newest entry that is known: only later ones count
        try:
            while True:
                try:
                    if last is None:
                        newest: Any = await reader.xrevrange("k3:cancel", count=1)
                        last = newest[0][0] if newest else "0-0"
                    since: Any = {"k3:cancel": last}
                    reply: Any = await reader.xread(since, block=0)
                    entries = reply["k3:cancel"][0] if isinstance(reply, dict) else reply[0][1]
                    for entry_id, fields in entries:
                        last = entry_id
                        if request_id := fields.get("request_id"):
                            yield request_id
                except (RedisError, OSError):
                    await asyncio.sleep(1)
        finally:
            await reader.aclose()

    async def close(self, grace: float = 2.0) -> None:
        """Write what is queued, for `grace` seconds at most, give the lease back, end."""
        try:
            async with asyncio.timeout(grace):
                await self._written.wait()
                if self._lease:
                    await self._redis.eval(RELEASE, 1, self._lease, self._instance)
                await self._redis.delete(f"k3:eng:{self.owner}")
        except (TimeoutError, RedisError, OSError) as error:
            log.warning("the ledger closes with writes left", left=len(self._writes), error=str(error))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _write_on(self) -> None:
        pause = 0.1
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._writes:
                batch = [self._writes.popleft() for _ in range(min(256, len(self._writes)))]
                try:
                    async with self._redis.pipeline(transaction=False) as pipe:
                        for write in batch:
                            await self._send(write, pipe)
                        await pipe.execute()
                    self.available, pause = True, 0.1
                except (RedisError, OSError) as error:
                    self._writes.extendleft(reversed(batch))
                    if self.available:
                        log.warning("Redis is away; transitions wait in memory", error=str(error))
                    self.available = False
                    await asyncio.sleep(pause)
                    pause = min(2.0, pause * 2)
            self._written.set()

    async def _send(self, write: _Write, pipe: Any) -> None:
        ended = "1" if write.state in TERMINAL else "0"
        flat = [item for pair in write.fields.items() for item in pair]
        key = f"k3:req:{write.request_id}"
        head = [write.request_id, write.state.value, write.version, write.owner, ended, f"{write.at:.6f}"]
        await self._transition(
            keys=[key, f"{key}:log"], args=[*head, TTL_LIVE, TTL_ENDED, LOG_LENGTH, *flat], client=pipe
        )  # fmt: skip

    async def _beat(self, describe: Callable[[], dict[str, Value]]) -> None:
        while True:
            try:
                if self._lease and not await self._redis.eval(RENEW, 1, self._lease, self._instance, self._lease_ms):
                    if not await self._redis.set(self._lease, self._instance, nx=True, px=self._lease_ms):
                        self.lease_lost.set()
                        return
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.hset(f"k3:eng:{self.owner}", mapping={**describe(), "at": f"{time.time():.3f}"})
                    pipe.expire(f"k3:eng:{self.owner}", ENGINE_TTL_S)
                    await pipe.execute()
                self.available = True
            except (RedisError, OSError) as error:
                if self.available:
                    log.warning("Redis is away", error=str(error))
                self.available = False
            await asyncio.sleep(self._lease_ms / 1000 / BEATS_PER_LEASE)

    def _drop_superseded(self) -> None:
        """The queue is full because Redis is long away: keep each request's newest state only."""
        newest = {write.request_id: write for write in self._writes}
        log.warning("the ledger's queue is full; intermediate transitions are dropped", dropped=len(self._writes) - len(newest))
        self._writes = deque(newest.values())
