"""Step 5: chunked prompts, prefix hits, block boundaries, concurrency, cancellation and slots that are used again, with graphs
checked on a GPU. What comes back must not depend on company, and nothing may be left."""

import asyncio
import contextlib
from typing import Any

from k3mesh.client import Client
from k3mesh.errors import MeshError
from services.launch.bench.load import Pass, Prompt, drive, post
from services.launch.bench.timed import ask
from services.launch.state import StateDir
from services.launch.validate.report import Check, Found, check
from services.launch.validate.site import Site

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 700)  # around blocks of 128, and over several chunks
CANCELLED, QUIET_S = 6, 30.0
FLAGS = "--num-blocks 200"


def run(site: Site) -> Found:
    debug = "--graph-debug" if site.gpus else ""
    chunks = "--chunked-prefill-size 256"
    with site.mesh("requests", f"{site.drafter()} {FLAGS}", f"{debug} --max-num-seqs 4 --num-slots 5", chunks) as state:
        return asyncio.run(_run(site, state))


async def _run(site: Site, state: StateDir) -> Found:
    exact = site.engines()[0].compute_dtype == "float32"
    url = state.addresses()["url"]
    prompts = [Prompt([(n * n + 3 * n + length) % 500 for n in range(length)]) for length in LENGTHS]

    async def answers(at_once: int) -> Pass:
        return await drive(url, prompts, at_once, max_tokens=12, temperature=0, ignore_eos=True)

    alone, again, together = await answers(1), await answers(1), await answers(len(prompts))
    cached = await _cached(url, prompts[-1])
    await asyncio.gather(*(_cancel(url, prompts[-1]) for _ in range(CANCELLED)))
    after = await answers(1)
    held = await _held(state)
    limit = "all" if exact else "batches round differently in bfloat16; not judged"

    def equal(compared: str, other: Pass) -> Check:
        same = sum(a == b for a, b in zip(alone.answers, other.answers, strict=True))
        return check(compared, f"{same} of {len(prompts)} as at first", same == len(prompts) or not exact, limit)

    return [
        equal("answers with their prompts' blocks cached", again),
        equal("answers in company", together),
        check("tokens from the cache of a prompt asked again", f"{cached} of {LENGTHS[-1]}", cached >= 128, "a block"),
        equal(f"answers after {CANCELLED} cancellations", after),
        check("held when all have ended", ", ".join(f"{it} {n}" for it, n in held.items()) or "nothing", not held, "nothing"),
    ], {"lengths": LENGTHS}


async def _cached(url: str, prompt: Prompt) -> int:
    path, body = prompt.request()
    answer = await post(url, path, {**body, "max_tokens": 2, "temperature": 0})
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def _cancel(url: str, prompt: Prompt) -> None:
    """A client that leaves in the middle of its answer."""
    _, body = prompt.request()
    task = asyncio.ensure_future(ask(url, {**body, "max_tokens": 400, "ignore_eos": True}))
    await asyncio.wait([task], timeout=0.3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, MeshError):
        await task


async def _held(state: StateDir) -> dict[str, int]:
    """Requests, places, blocks and rooms that somebody still has, by process; empty when all is free, within QUIET_S."""
    addresses: Any = state.addresses()
    held: dict[str, int] = {}
    async with Client(addresses["prefill-0"]["scheduler"]) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while True:
                    held = {}
                    for engine in ("prefill-0", "decode-0"):
                        for rank, address in enumerate(addresses[engine]["workers"]):
                            counters = (await client.inspect("worker", address)).counters
                            held |= {f"{engine}.worker-{rank} {k}": v for k, v in counters.items() if v and k != "tasks"}
                    if not held:
                        break
                    await asyncio.sleep(0.2)
    return held
