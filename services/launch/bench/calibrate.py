"""Straight lines through what a mesh was seen to take: the constants of the simulator's measured model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from services.launch.bench.play import Play, Played, Script

PROMPTS = (16, 48, 72, 104, 128)  # each in one chunk
CONTEXTS = (64, 1500)
ANSWER = 32
ONE_BY_ONE = Script("one-by-one", tuple((prompt, 4) for prompt in PROMPTS * 3))
LONGER = Script("longer", tuple((prompt, ANSWER) for prompt in CONTEXTS * 2))
CROWDS = tuple(Script(f"crowd-{count}", ((48, 48),) * count, count) for count in (4, 8))
FULL = Script("full", ((2000, 2),) * 2)  # all stages have work
FILLING = 1.1  # of FULL's time in which they have: the first chunk finds them idle, and the last leaves them so
SCRIPTS = (ONE_BY_ONE, LONGER, FULL, *CROWDS)
LOOPBACK = 1e9  # bytes a second


@dataclass(frozen=True)
class Seen:
    """The plays of SCRIPTS, by name, and what a message took."""

    plays: Mapping[str, Play]
    message_s: float
    processors: int
    replicas: int


Values = dict[str, tuple[Any, str]]  # by name: value and unit


def constants(seen: Seen, where: str) -> dict[str, Any]:
    """A constants file's content. `where`: what was measured, for the sources."""
    processors = _processors(seen)
    values = {
        "processors": (processors, "cores that all processes of the mesh share"),
        **_messages(seen),
        **_stages(seen),
        **_rounds(seen, processors),
        **_beside(seen),
        "nic_bytes_per_s": (LOOPBACK, "B/s between two agents"),
        "host_copy_bytes_per_s": (LOOPBACK, "B/s"),
        "acceptance": ([], "share of windows whose first k proposals are right"),
    }
    entries = {name: {"value": value, "unit": unit, "source": where} for name, (value, unit) in values.items()}
    return {"name": where, "model": "measured", "constants": entries}


def _processors(seen: Seen) -> float:
    """What the mesh got of the machine when it could use all of it; others may run there."""
    full = seen.plays[FULL.name]
    got = sum(full.cpu.values()) / sum(it.finished - it.sent for it in full.requests)
    return min(float(seen.processors), FILLING * got)


def _messages(seen: Seen) -> Values:
    """What a lone request of one chunk waits for beside the stages' compute, by its ledger; and what is left of its TTFT."""
    alone = seen.plays[ONE_BY_ONE.name].requests
    schedulers = median(float(it.ledger["queued_seconds"]) for it in alone) / 2
    agents = median(float(it.ledger["ready_seconds"]) for it in alone) + schedulers
    stages = len(_spans(alone[0]))
    between = median(float(it.ledger["prefill_seconds"]) - _compute(it) for it in alone)
    link = max(0.0, between) / (stages + 1)  # the step's way there and back, and the hops between the stages
    before = 2 * seen.message_s + schedulers + agents + link * stages
    transfer = max(0.0, median(it.ttft - before - _compute(it) for it in alone))
    return {
        "client_s": (seen.message_s, "s, client to scheduler"),
        "schedulers_s": (schedulers, "s, one scheduler to the other"),
        "agents_s": (agents, "s, from a manifest until all prefill agents are ready"),
        "step_s": (link, "s, scheduler to a stage's workers"),
        "round_s": (2 * seen.message_s, "s, scheduler to all replicas' workers and back"),
        "transfer_s": (transfer, "s of each stage's part of a chunk, beside its bytes"),
        "hop_s": (link, "s of a step between two stages"),
        "hop_token_s": (0.0, "s for each token of it"),
    }


def _stages(seen: Seen) -> Values:
    """A line for each stage, and how much of it is computing."""
    alone = seen.plays[ONE_BY_ONE.name]
    by_stage = zip(*(_spans(it) for it in alone.requests), strict=True)
    lines = [_line([(end - start, took) for start, end, took in spans]) for spans in by_stage]
    share = alone.cpu["prefill-0.worker"] / sum(_compute(it) for it in alone.requests)
    return {
        "stage_share": (min(1.0, share), "computing / time of a stage's step"),
        "stage_step_s": ([fixed for fixed, _ in lines], "s of a step, by stage"),
        "stage_token_s": ([token for _, token in lines], "s for each token of it, by stage"),
        "stage_pair_s": (0.0, "s for each query and key"),
        "stage_last_s": (0.0, "s for each prompt that ends on the last stage: in its step already"),
    }


def _rounds(seen: Seen, processors: float) -> Values:
    """A round by bucket and cached tokens, as it would be were there a core for each replica: they compute at one time."""
    longer = seen.plays[LONGER.name]
    first, context = _line([(it.prompt_tokens + ANSWER / 2, _round_seconds(it)) for it in longer.requests])
    rows = [(1.0, first)]
    for script in CROWDS:
        each = script.at_once // seen.replicas
        prompt, answer = script.requests[0]
        took = median(_round_seconds(it) for it in seen.plays[script.name].requests)
        rows.append((float(each), took - context * each * (prompt + answer / 2)))
    fixed, row = _line(rows)
    seconds = seen.replicas * sum(float(it.ledger["seconds"]) for it in longer.requests)
    share = min(1.0, longer.cpu["decode-0.worker"] / seconds)
    alone = max(share, 1 - share * (max(1.0, seen.replicas / processors) - 1))  # of the time that it took
    return {
        "round_share": (min(1.0, share / alone), "computing / time of a replica's round"),
        "replica_round_s": (fixed * alone, "s of a replica's round"),
        "replica_row_s": (row * alone, "s for each row of its bucket"),
        "replica_context_s": (context * alone, "s for each cached token of its requests"),
    }


def _beside(seen: Seen) -> Values:
    """Processor time of agents and schedulers."""
    alone, longer = seen.plays[ONE_BY_ONE.name], seen.plays[LONGER.name]
    stages, requests = len(_spans(alone.requests[0])), len(alone.requests)
    agents, schedulers = (alone.cpu[f"prefill-0.{kind}"] + alone.cpu[f"decode-0.{kind}"] for kind in ("agent", "scheduler"))
    rounds = sum(int(it.ledger["rounds"]) for it in longer.requests)
    return {
        "part_cpu_s": (agents / requests / stages, "processor s of both agents for a stage's part of a chunk"),
        "request_cpu_s": (schedulers / requests, "processor s of both schedulers for a request"),
        "round_cpu_s": (longer.cpu["decode-0.scheduler"] / rounds, "processor s of the decode scheduler for a round"),
    }


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of two calibrations, for what happened between them: a machine is not equally fast all the time."""
    entries: dict[str, Any] = {}
    for name, entry in before["constants"].items():
        ours, theirs = entry["value"], after["constants"][name]["value"]
        middle = [(a + b) / 2 for a, b in zip(ours, theirs, strict=True)] if isinstance(ours, list) else (ours + theirs) / 2
        entries[name] = {**entry, "value": middle}
    return {**before, "constants": entries}


def _spans(it: Played) -> list[tuple[int, int, float]]:
    """(start, end, seconds) of its one chunk, by stage."""
    return [(start, end, ended - started) for _, start, end, started, ended in sorted(it.chunks)]


def _compute(it: Played) -> float:
    """Seconds of its chunk on all stages."""
    return sum(took for *_, took in _spans(it))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y = a + b x, neither below 0; medians of equal x, so that one slow step does not bend it."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    x, y = np.array(list(by_x)), np.array([median(values) for values in by_x.values()])
    slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    return max(0.0, float(np.mean(y) - slope * np.mean(x))), slope


def _round_seconds(it: Played) -> float:
    return float(it.ledger["seconds"]) / int(it.ledger["rounds"])
