"""Straight lines through what a mesh was seen to take: the constants of the simulator's measured model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from services.launch.bench.play import Play, Played, Script

PROMPTS = (16, 48, 80, 112, 144, 176, 208, 240, 256)  # each in one chunk where there is no prefix cache
CONTEXTS = (64, 512, 1024, 1536)
ANSWER = 48
ONE_BY_ONE = Script("one-by-one", tuple((prompt, 8) for prompt in PROMPTS * 3))
LONGER = Script("longer", tuple((prompt, ANSWER) for prompt in CONTEXTS * 2))
CROWDS = tuple(Script(f"crowd-{count}", ((48, 96),) * count, count) for count in (4, 8))
SCRIPTS = (ONE_BY_ONE, LONGER, *CROWDS)
CONTROL_SHARE = 0.2  # of a round of one request: what is not the ranks' own compute
LOOPBACK = 1e9  # bytes a second


@dataclass(frozen=True)
class Seen:
    """The plays of SCRIPTS, by name, and what a message took."""

    plays: Mapping[str, Play]
    message_s: float
    processors: int
    replicas: int


def constants(seen: Seen, where: str) -> dict[str, Any]:
    """A constants file's content. `where`: what was measured, for the sources."""
    alone = seen.plays[ONE_BY_ONE.name].requests
    step, token = _line([(end - start, took) for it in alone for start, end, took in _spans(it)[:-1]])
    last = max(0.0, median(_spans(it)[-1][2] - step - token * it.prompt_tokens for it in alone))
    schedulers = median(float(it.ledger["queued_seconds"]) for it in alone) / 2
    agents = median(float(it.ledger["ready_seconds"]) for it in alone) + schedulers
    stages = max(stage for stage, *_ in alone[0].chunks) + 1
    between = median(float(it.ledger["prefill_seconds"]) - sum(took for *_, took in _spans(it)) for it in alone)
    link = max(0.0, between) / (stages + 1)  # the step's way there and back, and the hops between the stages
    before = 2 * seen.message_s + schedulers + agents + link * stages
    transfer = max(0.0, median(it.ttft - before - sum(took for *_, took in _spans(it)) for it in alone))
    fixed, row, context = _rounds(seen)
    values: dict[str, tuple[Any, str]] = {
        "processors": (seen.processors, "cores that all ranks share"),
        "client_s": (seen.message_s, "s, client to scheduler"),
        "schedulers_s": (schedulers, "s, one scheduler to the other"),
        "agents_s": (agents, "s, from a manifest until all prefill agents are ready"),
        "step_s": (link, "s, scheduler to a stage's workers"),
        "round_s": (fixed * CONTROL_SHARE, "s, scheduler to all replicas' workers and back"),
        "transfer_s": (transfer, "s of each stage's part of a chunk, beside its bytes"),
        "nic_bytes_per_s": (LOOPBACK, "B/s between two agents"),
        "host_copy_bytes_per_s": (LOOPBACK, "B/s"),
        "stage_step_s": (step, "s of a stage and step"),
        "stage_token_s": (token, "s for each token of it"),
        "stage_pair_s": (0.0, "s for each query and key"),
        "stage_last_s": (last, "s for each prompt that ends on the last stage"),
        "hop_s": (link, "s of a step between two stages"),
        "hop_token_s": (0.0, "s for each token of it"),
        "replica_round_s": (fixed * (1 - CONTROL_SHARE), "s of a replica's round"),
        "replica_row_s": (row, "s for each row of its bucket"),
        "replica_context_s": (context, "s for each cached token of its requests"),
        "acceptance": ([], "share of windows whose first k proposals are right"),
    }
    entries = {name: {"value": value, "unit": unit, "source": where} for name, (value, unit) in values.items()}
    return {"name": where, "model": "measured", "constants": entries}


def _spans(it: Played) -> list[tuple[int, int, float]]:
    """(start, end, seconds) of its one chunk, by stage."""
    return [(start, end, ended - started) for _, start, end, started, ended in sorted(it.chunks)]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y = a + b x, neither below 0; medians of equal x, so that one slow step does not bend it."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    x, y = np.array(list(by_x)), np.array([median(values) for values in by_x.values()])
    slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    return max(0.0, float(np.mean(y) - slope * np.mean(x))), slope


def _rounds(seen: Seen) -> tuple[float, float, float]:
    """Seconds of a round: fixed, for each row of the bucket, for each cached token of a replica."""
    alone = seen.plays[LONGER.name].requests
    contexts = [(it.prompt_tokens + ANSWER / 2, _round_seconds(it)) for it in alone]
    first, context = _line(contexts)
    rows = [(1.0, first)]
    for script in CROWDS:
        each = script.at_once // seen.replicas
        prompt, answer = script.requests[0]
        took = median(_round_seconds(it) for it in seen.plays[script.name].requests)
        rows.append((float(each), took - context * each * (prompt + answer / 2)))
    fixed, row = _line(rows)
    return fixed, row, context


def _round_seconds(it: Played) -> float:
    return float(it.ledger["seconds"]) / int(it.ledger["rounds"])
