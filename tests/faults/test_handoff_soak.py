"""A thousand random handoffs between real agents over real UCX, then two hundred batches with faults: never a wrong byte, never
a request beyond its deadline, nothing left. `make test` runs a slice; K3MESH_SOAK_SEED chooses others."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.lib.handoff_soak import AGENT_FAULTS, FRAME_FAULTS, STATES, Soak

PARTITIONS = ((3, 2, 1), (1, 1, 4), (4, 2), (1, 5), (2, 2, 1, 1))
SEED = int(os.environ.get("K3MESH_SOAK_SEED", "1"))
QUICK = dict(beat=1.5, progress=3.0, drain=1.0, resume=5.0)  # seconds, so that a fault is over in a few
HARMLESS = ("none", "delay", "reorder", "duplicate", "late", "reset")
FAULTS = (*FRAME_FAULTS, *(f"cancel: {state}" for state in STATES), "cancel: while delayed")

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Say:
    """Progress is to be seen while it is made."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def said(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end="", flush=True)

    return said


@pytest.fixture(scope="module")
def tally(say: Say) -> Iterator[Counter[tuple[str, str]]]:
    """Outcomes of all that this run plays, told at its end."""
    outcomes: Counter[tuple[str, str]] = Counter()
    yield outcomes
    ends = {fault: {end: n for (it, end), n in sorted(outcomes.items()) if it == fault} for fault, _ in sorted(outcomes)}
    say(f"handoffs by fault and outcome, {outcomes.total()} in all: {ends}")


async def random_handoffs(soak: Soak, count: int, say: Say) -> None:
    """All at once, but for what the pools hold."""
    await soak.start()
    left = iter(range(count))

    async def requests() -> None:
        for number in left:
            await soak.request("none")
            if number % 50 == 49:
                say(f"{soak.name}: {number + 1} of {count} handoffs, {soak.bytes >> 20} MiB compared, all equal")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(requests())
        await soak.at_rest()
    finally:
        await soak.close()
    assert soak.outcomes == {("none", "ready"): count}


async def with_faults(soak: Soak, faults: Sequence[str], say: Say) -> None:
    await soak.start()
    try:
        for number, fault in enumerate([*Random(soak.seed).sample(faults, len(faults)), "none"], start=1):
            await soak.batch(fault)
            if number % 10 == 0:
                say(f"{soak.name}: {number} of {len(faults)} faults, {soak.bytes >> 20} MiB compared, all equal")
        await soak.at_rest()
    finally:
        await soak.close()
    ends = {fault: {end for it, end in soak.outcomes if it == fault} for fault, _ in soak.outcomes}
    assert all(ends[fault] == {"ready"} for fault in HARMLESS if fault in ends), ends
    assert all(ends[fault] - {"ready"} for fault in faults if fault not in HARMLESS and fault != "cancel: done"), ends


async def test_random_handoffs_are_byte_exact(tmp_path: Path, say: Say):
    await random_handoffs(Soak(tmp_path, PARTITIONS[0], SEED), 50, say)


async def test_no_fault_installs_a_wrong_byte_or_leaves_anything(tmp_path: Path, say: Say):
    await with_faults(Soak(tmp_path, PARTITIONS[2], SEED, **QUICK), [*FAULTS, "kill D", "stop P"], say)


@pytest.mark.soak
@pytest.mark.timeout(290)
@pytest.mark.parametrize("part", range(10))
async def test_a_thousand_random_handoffs_are_byte_exact(tmp_path: Path, say: Say, tally: Counter[Any], part: int):
    soak = Soak(tmp_path, PARTITIONS[part % 5], 1000 * SEED + part)
    await random_handoffs(soak, 100, say)
    tally.update(soak.outcomes)


@pytest.mark.soak
@pytest.mark.timeout(290)
@pytest.mark.parametrize("part", range(10))
async def test_two_hundred_faults_install_no_wrong_byte_and_leave_nothing(
    tmp_path: Path, say: Say, tally: Counter[Any], part: int
):
    soak = Soak(tmp_path, PARTITIONS[part % 5], 1000 * SEED + part, **QUICK)
    await with_faults(soak, [*FAULTS, *AGENT_FAULTS, AGENT_FAULTS[part % 4]], say)
    tally.update(soak.outcomes)
