"""Conversations through the whole mesh with a prefix cache: tokens are those of a full recompute, and what usage calls cached
was not computed. Few blocks and slots, so that entries make way in the middle of conversations."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lib.drafted import SMALL
from tests.lib.load import Answer, assert_nothing_left, attempt, complete, complete_all, prompts, until_health
from tests.lib.mesh import Mesh, running_mesh
from tests.lib.oracle import Oracle
from tests.lib.predictable import predictable

VOCAB = 512
TURNS, AT_ONCE = 4, 4
PREFILL = "--chunked-prefill-size 256 --max-num-seqs 4 --num-blocks 49 --num-slots 12"
DECODE = "--max-num-seqs 8 --num-blocks 65 --low-latency-max-num-tokens-per-gpu 32"
WIDTHS = {"DSPARK": 8, "MTP": 4}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with its NextN layer, and a DSpark drafter."""
    flags = [word for word in SMALL if word != "--no-tokenizer"]
    return predictable(tmp_path_factory.mktemp("prefix"), *flags, share=0.02)


@contextmanager
def caching_mesh(checkpoints: tuple[Path, Path], algorithm: str, *more: str) -> Iterator[Mesh]:
    target, drafter = checkpoints
    flags = " ".join(more)
    if algorithm in WIDTHS:
        flags += f" --speculative-algorithm {algorithm} --speculative-num-draft-tokens {WIDTHS[algorithm]}"
    if algorithm == "DSPARK":
        flags += f" --speculative-draft-model-path {drafter}"
    topology = "laptop" if algorithm == "MTP" else "laptop-tp2"
    with running_mesh(target, "--topology", topology, f"--prefill={PREFILL} {flags}", f"--decode={DECODE} {flags}") as mesh:
        yield mesh


def algorithms() -> list[Any]:
    """One in every run, the others in `make soak`."""
    return [pytest.param(it, marks=() if it == "DSPARK" else pytest.mark.soak) for it in ("DSPARK", "MTP", "none")]


@pytest.fixture(scope="module", params=algorithms())
def mesh(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Mesh]:
    with caching_mesh(checkpoints, request.param) as mesh:
        yield mesh


@dataclass(frozen=True)
class Computed:
    """What the prefill engine has done since its start."""

    tokens: set[int]  # by worker
    totals: dict[str, int]

    @classmethod
    async def until_now(cls, mesh: Mesh) -> "Computed":
        seen = await mesh.inspect()
        workers = {it.totals["tokens"] for name, it in seen.items() if name.startswith("prefill-0.worker")}
        return cls(workers, seen["prefill-0.scheduler"].totals)


async def converse(client: httpx.AsyncClient, seed: int) -> list[Answer]:
    """The answers of one conversation. Each turn asks with everything that was said before."""
    chosen, history, answers = random.Random(seed), [], []
    for _ in range(TURNS):
        history += [chosen.randrange(300, VOCAB) for _ in range(chosen.choice((40, 100, 128, 200, 300)))]
        answers.append(await complete(client, history, max_tokens=12, ignore_eos=True))
        history = [*history, *answers[-1].tokens]
    return answers


async def converse_all(mesh: Mesh, count: int) -> list[list[Answer]]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as client:

        async def one(seed: int) -> list[Answer]:
            async with gate:
                return await converse(client, seed)

        return await asyncio.gather(*map(one, range(count)))


async def assert_cached_tokens_were_not_computed(mesh: Mesh, before: Computed, conversations: list[list[Answer]]) -> None:
    answers = [answer for answers in conversations for answer in answers]
    now, cached = await Computed.until_now(mesh), sum(answer.cached_tokens for answer in answers)
    (computed,), (start,) = now.tokens, before.tokens
    assert computed - start == sum(len(answer.prompt) for answer in answers) - cached, "usage says something else"
    counted = {key: now.totals[key] - before.totals[key] for key in ("prefix_cache_queries", "prefix_cache_hits")}
    assert counted == {"prefix_cache_queries": sum(len(answer.prompt) for answer in answers), "prefix_cache_hits": cached}


@pytest.mark.timeout(240)
async def test_turns_of_conversations_get_the_tokens_of_a_full_recompute(mesh: Mesh, checkpoints: tuple[Path, Path]):
    before = await Computed.until_now(mesh)
    conversations = await converse_all(mesh, 12)
    await assert_cached_tokens_were_not_computed(mesh, before, conversations)
    assert sum(answer.cached_tokens > 0 for answers in conversations for answer in answers) > 12, "hardly a hit: a weak test"
    totals = (await Computed.until_now(mesh)).totals
    assert totals["prefix_cache_evictions"] > 0 and totals["checkpoint_evictions"] > 0, "nothing made way: a weak test"
    oracle = Oracle(checkpoints[0])
    for answers in conversations:
        for answer in answers:
            oracle.assert_greedy(answer.prompt, answer.tokens)
    await assert_nothing_left(mesh)


async def test_a_turn_computes_what_is_behind_the_last_full_block_of_the_turn_before(mesh: Mesh):
    """Alone, so that nothing makes way."""
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        answers = await converse(client, 1000)
    known = [(len(answer.prompt) - 1) // 128 * 128 for answer in answers]
    assert [answer.cached_tokens for answer in answers] == [0, *known[:-1]]


async def test_blocks_that_decode_has_are_not_sent(mesh: Mesh):
    """Those of an answer too, which prefill has never seen: it computes them and keeps them to itself."""
    prompt, more, other, shorter, little = prompts(5, [250, 50, 340, 212, 100], VOCAB, 5000)

    async def ask(prompt: list[int], max_tokens: int = 2) -> tuple[Answer, int, int]:
        before = await sent(mesh)
        (answer,) = await complete_all(mesh, [prompt], max_tokens, 1, ignore_eos=True)
        await assert_nothing_left(mesh)  # all of it has been counted
        bytes_sent, tokens = (now - then for now, then in zip(await sent(mesh), before, strict=True))
        return answer, bytes_sent, tokens

    first, _, _ = await ask(prompt, 40)
    (_, whole, _), (_, block_less, _) = await ask(other), await ask(shorter)
    turn, rest, found = await ask([*prompt, *first.tokens, *more])
    assert (turn.cached_tokens, found) == (128, 256)
    assert whole - rest == 2 * (whole - block_less) > 0
    first, _, _ = await ask(little, 60)
    turn, _, found = await ask([*little, *first.tokens, *more])
    assert (turn.cached_tokens, found) == (0, 128), "a block that decode named by itself"


async def sent(mesh: Mesh) -> tuple[int, int]:
    """Bytes that prefill's agents have sent, and tokens whose blocks decode had already, since the start."""
    seen = await mesh.inspect()
    total = sum(it.totals["bytes_sent"] for name, it in seen.items() if name.startswith("prefill-0.agent"))
    return total, seen["decode-0.scheduler"].totals["prefix_cache_hits"]


async def test_a_third_prompt_starts_where_two_others_parted(mesh: Mesh):
    common, *ends = prompts(4, [200, 150, 170, 190], VOCAB, 2000)  # they part before the first chunk ends
    cached = [(await complete_all(mesh, [common + end], 2, 1, ignore_eos=True))[0].cached_tokens for end in ends]
    assert cached == [0, 0, 128]


async def test_clients_that_leave_during_prefill_leave_nothing_and_disturb_nobody(mesh: Mesh):
    (first,) = prompts(1, [900], VOCAB, 3000)
    (undisturbed,) = await complete_all(mesh, [first], 8, 1, ignore_eos=True)

    async def leave(client: httpx.AsyncClient, after: float) -> None:
        body = {"prompt": [*first[:700], *range(300, 500)], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        try:
            async with asyncio.timeout(after):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            pass

    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        leaving = [leave(client, 0.02 * n) for n in range(12)]
        staying = complete_all(mesh, [first] * 4, 8, 4, ignore_eos=True)
        *_, stayed = await asyncio.gather(*leaving, staying)
    assert [answer.tokens for answer in stayed] == [undisturbed.tokens] * 4
    await assert_nothing_left(mesh)


@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_an_engine_that_starts_anew_knows_nothing_of_the_cache_before(mesh: Mesh):
    (prompt,) = prompts(1, [500], VOCAB, 4000)
    (before,) = await complete_all(mesh, [prompt], 8, 1, ignore_eos=True)
    mesh.signal("prefill-0.worker-0")
    await until_health(mesh, 503)
    await until_health(mesh)
    again = [await attempt(mesh, prompt, 8) for _ in range(2)]
    assert all(isinstance(answer, Answer) and answer.tokens == before.tokens for answer in again)
    cached = [(await complete_all(mesh, [prompt], 8, 1, ignore_eos=True))[0].cached_tokens]
    assert cached == [384]
    await assert_nothing_left(mesh)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["none", "DSPARK", "MTP"])
async def test_a_hundred_conversations_get_the_same_tokens_with_and_without_a_prefix_cache(
    checkpoints: tuple[Path, Path], algorithm: str
):
    with caching_mesh(checkpoints, algorithm) as mesh:
        before = await Computed.until_now(mesh)
        cached = await converse_all(mesh, 100)
        await assert_cached_tokens_were_not_computed(mesh, before, cached)
        await assert_nothing_left(mesh)
    with caching_mesh(checkpoints, algorithm, "--no-enable-prefix-caching") as mesh:
        plain = await converse_all(mesh, 100)
    assert not any(answer.cached_tokens for answers in plain for answer in answers)
    assert sum(answer.cached_tokens > 0 for answers in cached for answer in answers) > 100
    assert [[answer.tokens for answer in answers] for answers in cached] == [[a.tokens for a in answers] for answers in plain]
