"""`k3mesh inspect REQUEST`: where a request is, how it came there and where its time went, read from Redis.

k3:req:ID      hash    the state now, with the figures of all transitions
k3:req:ID:log  stream  one entry a transition, with its own figures
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import redis
from redis.exceptions import RedisError

from k3mesh.errors import ConfigError, EngineLost, NotFound

COMMON = {
    "state",
    "owner",
    "at",
    "late",
    "attempt",
    "room",
    "d_epoch",
}  # of an entry: told in columns of their own, or in the head
ELSEWHERE = {"chunks", "first_byte", "last_byte", "accepted_at"}  # told in the timeline
Entry = Mapping[str, str]


def main(argv: list[str]) -> int:
    """Print one request. NotFound if Redis has (no longer) a record of it."""
    parser = _Parser(prog="k3mesh inspect", description="A request's state, transition log and timeline.")
    parser.add_argument("request", metavar="REQUEST", help="request id, as the answer's `id` or the X-Request-Id header has it")
    parser.add_argument("--state-dir", default=".state", help="directory that `k3mesh up` was given (.state)")
    parser.add_argument("--redis-url", help="ask this Redis instead")
    arguments = parser.parse_args(argv)
    request_id = arguments.request.removeprefix("chatcmpl-").removeprefix("cmpl-")  # an answer's id has the endpoint before it
    state, log = read(request_id, arguments.redis_url or redis_url_of(arguments.state_dir))
    print("\n".join(render(request_id, state, log)))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def redis_url_of(state_dir: str) -> str:
    """The Redis of the mesh that was started with this state directory."""
    try:
        return str(json.loads((Path(state_dir) / "ports.json").read_text())["redis"])
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            f"--state-dir {state_dir}: no mesh was started there; give its directory, or --redis-url", param="state_dir"
        ) from None


def read(request_id: str, redis_url: str) -> tuple[Entry, list[Entry]]:
    """(hash, log entries by time). EngineLost if Redis does not answer."""
    try:
        client: Any = redis.Redis.from_url(redis_url, decode_responses=True, socket_connect_timeout=2, socket_timeout=5)
        with client:
            state: Entry = client.hgetall(f"k3:req:{request_id}")
            entries: list[tuple[str, Entry]] = client.xrange(f"k3:req:{request_id}:log")
    except ValueError as error:
        raise ConfigError(f"--redis-url {redis_url}: {error}; give redis://HOST:PORT/N or unix://PATH") from None
    except (RedisError, OSError) as error:
        raise EngineLost(f"Redis at {redis_url} does not answer ({error}); does the mesh run?") from None
    if not state:
        raise NotFound(f"request {request_id}: Redis has no record of it; records are kept for an hour after the end")
    return state, sorted((entry for _, entry in entries), key=lambda entry: float(entry["at"]))


def render(request_id: str, state: Entry, log: Sequence[Entry]) -> list[str]:
    """Lines: head, log, timeline."""
    start = float(log[0]["at"]) if log else 0.0
    why = state.get("message") or state.get("reason") or ""
    lines = [f"{request_id}: {state['state']}{f' ({why})' if why else ''}"]
    lines.append(f"attempt {state.get('attempt', '0')}, room {state.get('room', '-')}, last written by {state['owner']}")
    lines += ["", f"{'ms':>9}  {'state':<14} {'by':<12} figures"]
    for entry in log:
        figures = " ".join(f"{k}={v}" for k, v in entry.items() if k not in COMMON | ELSEWHERE and v != "")
        moment = (float(entry["at"]) - start) * 1000
        lines.append(f"{moment:9.1f}  {entry['state']:<14} {_short(entry['owner']):<12} {figures}".rstrip())
    timeline = _timeline(state, log, start)
    return [*lines, "", "timeline", *(f"  {line}" for line in timeline)] if timeline else lines


def _timeline(state: Entry, log: Sequence[Entry], start: float) -> list[str]:
    """One line for each leg of the road that the request has gone so far."""
    lines: list[str] = []
    if "queued_seconds" in state:
        lines.append(f"queued     {_ms(state['queued_seconds'])} until D had reserved a place for it")
    if "ready_seconds" in state:
        held = f", then {_ms(state['held_seconds'])} until the first chunk went"
        lines.append(f"reserved   {_ms(state['ready_seconds'])} until all prefill ranks were ready{held}")
    cached, kept = state.get("cached_tokens", "0"), state.get("prefix_tokens", "0")
    if (cached, kept) != ("0", "0"):
        lines.append(f"cached     {cached} prompt tokens were not computed, rows of {kept} were at D already")
    for stage, first, end, started, ended in json.loads(state.get("chunks", "[]")):
        moment = (started - start) * 1000
        lines.append(
            f"prefill    stage {stage}, tokens {first}-{end - 1}: at {moment:.1f} ms for {(ended - started) * 1000:.1f} ms"
        )
    if "bytes" in state:
        moved, seconds = int(state["bytes"]), state["transfer_seconds"]
        lines.append(f"transfer   {moved:,} bytes in {_ms(seconds)}, {float(state['gb_s']):.3f} GB/s")
    if "rounds" in state:
        figures = f"{state['completion_tokens']} tokens, {float(state['tokens_per_s']):.1f} tokens/s"
        lines.append(f"decode     {state['rounds']} rounds in {_ms(state['seconds'])}, {figures}")
    if "windows" in state:
        accepted, windows = int(state["accepted"]), int(state["windows"])
        lines.append(
            f"drafted    {accepted} of {state['drafted']} proposals accepted, {1 + accepted / windows:.2f} tokens a round"
        )
    if "retractions" in state:
        back = f", the last time for {_ms(state['away_seconds'])}" if "away_seconds" in state else ""
        lines.append(f"away       {state['retractions']} times in host memory, while others had its blocks{back}")
    if state.get("ended") == "1" and log:
        lines.append(f"total      {(float(state['at']) - start) * 1000:.1f} ms")
    return lines


def _ms(seconds: str) -> str:
    return f"{float(seconds) * 1000:.1f} ms"


def _short(owner: str) -> str:
    return "gateway" if owner.startswith("gateway") else owner
