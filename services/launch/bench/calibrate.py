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
FULL = Script("full", ((1024, 2),) * 2)  # all stages have work
BESIDE_ONE = Script("beside-one", ((64, 160), *((prompt, 2) for prompt in (128, 72) * 8)), at_once=2)
BESIDE_FULL = Script("beside-full", ((64, 160), *((1024, 2),) * 3), at_once=2)
SCRIPTS = (ONE_BY_ONE, LONGER, FULL, BESIDE_ONE, BESIDE_FULL, *CROWDS)
SLOWEST = 0.05  # of the speed without others
LOOPBACK = 1e9  # bytes a second

Line = tuple[float, float]  # y = a + b x
Values = dict[str, tuple[Any, str]]  # by name: value and unit


@dataclass(frozen=True)
class Seen:
    """The plays of SCRIPTS, by name, and what a message took."""

    plays: Mapping[str, Play]
    message_s: float
    replicas: int


def constants(seen: Seen, where: str) -> dict[str, Any]:
    """A constants file's content. `where`: what was measured, for the sources."""
    stages, (context, fixed, row) = _stages(seen), _rounds(seen)
    values = {
        **_messages(seen),
        "stage_step_s": ([of for of, _ in stages], "s of a step, by stage"),
        "stage_token_s": ([of for _, of in stages], "s for each token of it, by stage"),
        "stage_pair_s": (0.0, "s for each query and key"),
        "stage_last_s": (0.0, "s for each prompt that ends on the last stage: in its step already"),
        "replica_round_s": (fixed, "s of a replica's round"),
        "replica_row_s": (row, "s for each row of its bucket"),
        "replica_context_s": (context, "s for each cached token of its requests"),
        **_contention(seen, stages, (fixed + row, context)),
        "nic_bytes_per_s": (LOOPBACK, "B/s between two agents"),
        "host_copy_bytes_per_s": (LOOPBACK, "B/s"),
        "acceptance": ([], "share of windows whose first k proposals are right"),
    }
    entries = {name: {"value": value, "unit": unit, "source": where} for name, (value, unit) in values.items()}
    return {"name": where, "model": "measured", "constants": entries}


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


def _stages(seen: Seen) -> list[Line]:
    """Seconds of a step by its tokens, for each stage."""
    by_stage: dict[int, list[tuple[float, float]]] = {}
    for it in seen.plays[ONE_BY_ONE.name].requests:
        for span in _spans(it):
            by_stage.setdefault(span.stage, []).append((span.tokens, span.seconds))
    return [_line(by_stage[stage]) for stage in sorted(by_stage)]


def _rounds(seen: Seen) -> tuple[float, float, float]:
    """Seconds of a round: for each cached token, fixed, for each row of the bucket."""
    longer = seen.plays[LONGER.name]
    first, context = _line([(it.prompt_tokens + ANSWER / 2, _round_seconds(it)) for it in longer.requests])
    rows = [(1.0, first)]
    for script in CROWDS:
        each = script.at_once // seen.replicas
        prompt, answer = script.requests[0]
        took = median(_round_seconds(it) for it in seen.plays[script.name].requests)
        rows.append((float(each), took - context * each * (prompt + answer / 2)))
    fixed, row = _line(rows)
    return context, fixed, row


def _contention(seen: Seen, stages: Sequence[Line], round_: Line) -> Values:
    """How stages slow each other and a round down, and a round the stages: with one of them at work, and with all."""
    many, full = _stages_speed(seen.plays[FULL.name].requests, stages)
    _, one_beside = _stages_speed(seen.plays[BESIDE_ONE.name].requests[1:], stages)
    many_beside, full_beside = _stages_speed(seen.plays[BESIDE_FULL.name].requests[1:], stages)
    one_slows, many_slow = (_round_speed(seen.plays[it.name], round_) for it in (BESIDE_ONE, BESIDE_FULL))
    return {
        "stages_speed": ([[1.0, 1.0], [many, full]], "of all stages at work together, by their number; 1: as one alone"),
        "stages_beside_speed": ([[1.0, one_beside], [many_beside, full_beside]], "likewise, while a round runs"),
        "round_beside_speed": ([[1.0, one_slows], [many_beside, many_slow]], "of a round by the stages at work; 1: as alone"),
    }


def _stages_speed(requests: Sequence[Played], stages: Sequence[Line]) -> tuple[float, float]:
    """Of requests that were prefilled one after the other: how many stages were at work on average while any was, and what
    they did together, in seconds of a stage alone for each second."""
    alone = sum(stages[it.stage][0] + stages[it.stage][1] * it.tokens for played in requests for it in _spans(played))
    taken = sum(it.seconds for played in requests for it in _spans(played))
    passed = sum(map(_prefilling, requests))
    return max(1.01, taken / passed), max(SLOWEST, alone / passed)


def _round_speed(play: Play, round_: Line) -> float:
    """Of the rounds of the script's first request while stages were at work on the others."""
    lead, others = play.requests[0], play.requests[1:]
    fixed, context = round_
    alone = fixed + context * (lead.prompt_tokens + lead.tokens / 2)
    passed = sum(map(_prefilling, others))
    seconds, rounds = float(lead.ledger["seconds"]), int(lead.ledger["rounds"])
    beside = rounds - (seconds - passed) / alone
    return min(1.0, max(SLOWEST, beside * alone / passed))


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of two calibrations, for what happened between them: a machine is not equally fast all the time."""
    entries: dict[str, Any] = {}
    for name, entry in before["constants"].items():
        middle = (np.array(entry["value"]) + np.array(after["constants"][name]["value"])) / 2
        entries[name] = {**entry, "value": middle.tolist()}
    return {**before, "constants": entries}


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk on one stage."""

    stage: int
    tokens: int
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def _spans(it: Played) -> list[Span]:
    return [Span(stage, end - start, started, ended) for stage, start, end, started, ended in sorted(it.chunks)]


def _compute(it: Played) -> float:
    """Seconds of its chunks on all stages."""
    return sum(span.seconds for span in _spans(it))


def _prefilling(it: Played) -> float:
    """Seconds from its first chunk's start to its last one's end."""
    spans = _spans(it)
    return max(span.ended for span in spans) - min(span.started for span in spans)


def _line(points: Sequence[tuple[float, float]]) -> Line:
    """Neither part below 0; medians of equal x, so that one slow step does not bend it."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    x, y = np.array(list(by_x)), np.array([median(values) for values in by_x.values()])
    slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    return max(0.0, float(np.mean(y) - slope * np.mean(x))), slope


def _round_seconds(it: Played) -> float:
    return float(it.ledger["seconds"]) / int(it.ledger["rounds"])
