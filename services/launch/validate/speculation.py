"""Step 4: the same prompts, greedily, by meshes without speculation, with a drafter, and with a drafter and no graphs."""

import asyncio

from services.launch.bench.load import Prompt, drive
from services.launch.bench.serve import totals
from services.launch.state import StateDir
from services.launch.validate.report import Check, Found, check, not_run
from services.launch.validate.site import Site

PROMPTS = [
    Prompt("The module textwrap"), Prompt(chat="What does textwrap.dedent do?"), Prompt([5, 7, 11, 13] * 40),
    Prompt([n * n % 500 for n in range(300)]), Prompt("import os\n"), Prompt([3, 1, 4, 1, 5, 9, 2, 6] * 16),
]  # fmt: skip
Answers = list[list[int]]


def run(site: Site) -> Found:
    """One prompt at a time: every mesh then runs the same batches, and what differs is not the batch's rounding."""
    plain, _ = _answers(site, "plain", "")
    fixed = "--no-speculative-adaptive"
    drafted, counted = _answers(site, "drafted", site.drafter(), fixed)
    exact = site.engines()[0].compute_dtype == "float32"
    windows, handed = counted["windows"], counted["handoff_windows"]
    length = 1 + counted["tokens_accepted"] / max(1, windows)
    first = 1 + counted["handoff_accepted"] / max(1, handed)
    checks = [
        check("first tokens, with and without speculation", *_same([a[:1] for a in plain], [a[:1] for a in drafted])),
        _tokens("answers, with and without speculation", plain, drafted, exact),
        check(
            "windows that prefill handed over", f"{handed} of {len(PROMPTS)}", handed == len(PROMPTS), "one for each request"
        ),
        check(
            "acceptance of the first round after the handoff and of all",
            f"{first:.2f} and {length:.2f} tokens",
            first > length - 1.5,
            "alike: else rows, positions or taps differ between prefill and decode",
        ),
    ]
    if site.gpus:
        eager, _ = _answers(site, "eager", site.drafter(), f"{fixed} --enforce-eager")
        checks.append(_tokens("answers, by graphs and eager", eager, drafted, exact=True))
    else:
        checks.append(not_run("answers, by graphs and eager", "CUDA graphs need a GPU"))
    return checks, {"answer_tokens": sum(map(len, plain)), "windows": windows}


def _answers(site: Site, name: str, both: str, decode: str = "") -> tuple[Answers, dict[str, int]]:
    """The answers, and what the decode scheduler counted."""

    async def ask(state: StateDir) -> tuple[Answers, dict[str, int]]:
        url = state.addresses()["url"]
        done = await drive(url, PROMPTS, 1, max_tokens=site.arguments.output_tokens, temperature=0, ignore_eos=True)
        return done.answers, (await totals(state))["decode-0.scheduler"]

    with site.mesh(name, both, decode) as state:
        return asyncio.run(ask(state))


def _same(one: Answers, other: Answers) -> tuple[str, bool]:
    same = sum(a == b for a, b in zip(one, other, strict=True))
    return f"{same} of {len(one)} are equal", same == len(one)


def _tokens(compared: str, one: Answers, other: Answers, exact: bool) -> Check:
    """Equal in float32. In bfloat16 a row's rounding depends on how many rows a batch has, and now and then decides a near tie
    or a route: from there on an answer is another one."""
    figure, equal = _same(one, other)
    shared = sum(_common(a, b) for a, b in zip(one, other, strict=True)) / sum(map(len, one))
    limit = "all" if exact else "all but what follows a near tie in bfloat16: at least a quarter"
    figure = f"{figure}; {shared:.0%} of the tokens before a first difference"
    return check(compared, figure, equal if exact else shared >= 0.25, limit)


def _common(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
