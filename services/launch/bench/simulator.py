"""`k3mesh bench simulator`: a mesh and its simulation answer the same scripts; counts must be equal, times are compared.

Meshes run one after the other: one without prefix cache for the script whose requests come all at once, one as by default, one
of a single replica with too few blocks for two long answers, so that one of them makes way. Before and after each play the mesh
is calibrated: what its steps and rounds take becomes the simulator's constants (--constants keeps the last). `k3mesh sim` then
plays the same script with them. A script is such that its counts do not depend on time: prompts are multiples of a batch, or
one answer outlasts all others.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import Field

from k3mesh.errors import MeshError
from services.contracts.flags import FlagSet
from services.launch import up
from services.launch.bench import calibrate
from services.launch.bench.play import Play, Script, message_seconds, play
from services.launch.child import ROOT
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.scratch import scratch
from services.launch.state import StateDir

NO_CACHE = "--no-enable-prefix-caching"
WARM_UP = Script("warm-up", ((256, 8),) * 8, 4)
SEQUENTIAL = Script("sequential", tuple((prompt, 24) for prompt in (40, 300, 128, 700, 129, 512, 16, 1000, 257, 90)))
COVERED = Script("covered", ((64, 500), *((prompt, 16) for prompt in (100, 300, 60, 520, 128, 250, 33, 140))), at_once=2)
BURST = Script("burst", ((256, 200), *((256 * (1 + n % 3), 12) for n in range(11))), at_once=12)
SCARCE = Script("scarce", ((100, 1300), (100, 1300)), at_once=2)
FEW_BLOCKS = "--data-parallel-size 1 --expert-parallel-size 1 --num-blocks 18"
COUNTS = ("steps", "chunks", "rounds", "transferred_bytes", "retractions", "capacity_aborts")
TIMES = ("wall_s", "ttft_p50_s", "tpot_p50_s")


class SimulatorArguments(FlagSet):
    """k3mesh bench simulator."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    topology: Literal["laptop", "laptop-tp2"] = Field(default="laptop", description="as of `k3mesh up`")
    model: str = Field(default=str(ROOT / "models" / "demo"), description="checkpoint; the demo model if unset")
    prefill: str = Field(default="", description="more flags of the prefill engine, as of `k3mesh up`")
    decode: str = Field(default="", description="more flags of the decode engine, likewise")
    constants: str = Field(default="", description="where the constants are kept; they go with the meshes if unset")
    repeats: int = Field(default=3, ge=1, description="how often each script is played and simulated; medians are told")
    as_json: bool = Field(default=False, description="print one JSON object instead of a table")


@dataclass(frozen=True)
class Compared:
    """One script: counts and times of the mesh and of the simulator, each time that it was played."""

    script: str
    counts: dict[str, list[tuple[int, int]]]
    times: dict[str, list[tuple[float, float]]]

    @property
    def equal(self) -> bool:
        return all(real == simulated for pairs in self.counts.values() for real, simulated in pairs)

    @property
    def errors(self) -> dict[str, float]:
        """Of each time: the median of its relative errors."""
        return {name: median(simulated / real - 1 for real, simulated in pairs) for name, pairs in self.times.items()}


VARIANTS = (({"prefill": NO_CACHE}, (BURST,)), ({}, (SEQUENTIAL, COVERED)), ({"decode": FEW_BLOCKS}, (SCARCE,)))


def main(argv: list[str]) -> int:
    """Return 0 if every count is equal; MeshError if one differs."""
    arguments = SimulatorArguments.parse(argv, "k3mesh bench simulator")
    with scratch("bench") as folder:
        constants = Path(arguments.constants or folder / "constants.json")
        compared: list[Compared] = []
        for more, scripts in VARIANTS:
            varied = arguments.model_copy(update={role: f"{getattr(arguments, role)} {more[role]}".strip() for role in more})
            with _mesh(varied, folder / scripts[0].name) as state:
                compared += _compare(varied, state, scripts, constants)
    if arguments.as_json:
        print(json.dumps([{**asdict(it), "equal": it.equal, "errors": it.errors} for it in compared]))
    else:
        print("\n".join(line for it in compared for line in _table(it)))
    if different := [it.script for it in compared if not it.equal]:
        raise MeshError(f"the simulator counts otherwise than the mesh in {', '.join(different)}")
    return 0


@contextmanager
def _mesh(arguments: SimulatorArguments, folder: Path) -> Iterator[StateDir]:
    """A mesh for as long as the block lasts, or this process; it has played a warm-up."""
    up_arguments = _up_arguments(arguments, "--state-dir", str(folder), "--port", str(free_ports(1)[0]))
    _tell(f"starting a mesh {arguments.prefill} {arguments.decode}".rstrip())
    with up.attached(up_arguments):
        state = StateDir(folder)
        asyncio.run(play(state, WARM_UP, _vocabulary(arguments), seed=0))
        yield state


async def _calibrated(arguments: SimulatorArguments, state: StateDir) -> dict[str, Any]:
    _tell("calibrating")
    plays: dict[str, Play] = {}
    for script in calibrate.SCRIPTS:
        unseen = secrets.randbits(32)  # else the prefix cache has the prompts of the calibration before
        plays[script.name] = await play(state, script, _vocabulary(arguments), unseen)
    _, decode = _up_arguments(arguments).engines()
    seen = calibrate.Seen(plays, await message_seconds(state), decode.data_parallel_size)
    cores = len(os.sched_getaffinity(0))
    where = f"k3mesh bench simulator: {Path(arguments.model).name}, {arguments.topology}, {cores} cores"
    return calibrate.constants(seen, where)


def _compare(arguments: SimulatorArguments, state: StateDir, scripts: Sequence[Script], constants: Path) -> list[Compared]:
    """Play each script and simulate it with what the mesh took just before and just after, as often as asked."""
    compared = [Compared(it.name, {name: [] for name in COUNTS}, {name: [] for name in TIMES}) for it in scripts]
    before = asyncio.run(_calibrated(arguments, state))
    for repeat in range(arguments.repeats):
        for script, it in zip(scripts, compared, strict=True):
            _tell(f"playing {script.name}, {repeat + 1} of {arguments.repeats}")
            real = asyncio.run(play(state, script, _vocabulary(arguments), 2 + repeat))
            after = asyncio.run(_calibrated(arguments, state))
            constants.write_text(json.dumps(calibrate.between(before, after), indent=1) + "\n")
            before, simulated = after, _simulate(arguments, script, constants)
            for name, count in counts(real).items():
                it.counts[name].append((count, simulated[name]))
            for name, seconds in zip(TIMES, (real.seconds, real.ttft, real.tpot), strict=True):
                it.times[name].append((seconds, simulated[name]))
    return compared


def counts(it: Play) -> dict[str, int]:
    stages = max(stage for stage, *_ in it.requests[0].chunks) + 1
    return {
        "steps": it.prefill["steps"],
        "chunks": sum(len(request.chunks) for request in it.requests) // stages,
        "rounds": it.decode["rounds"],
        "transferred_bytes": sum(int(request.ledger["bytes_sent"]) for request in it.requests),
        "retractions": it.decode.get("retractions", 0),
        "capacity_aborts": it.decode["capacity_aborts"],
    }


def _simulate(arguments: SimulatorArguments, script: Script, constants: Path) -> Mapping[str, Any]:
    workload = constants.with_name(f"{script.name}.jsonl")
    workload.write_text(script.lines())
    named = {
        "topology": arguments.topology, "model": arguments.model, "workload": workload, "constants": constants,
        "at-once": script.at_once, "prefill": arguments.prefill, "decode": arguments.decode,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in named.items()] + ["--lead"]
    command = [sys.executable, "-m", "k3mesh.cli.main", "sim", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    workload.unlink()
    if done.returncode:
        raise MeshError(f"k3mesh sim: {done.stderr.strip().removeprefix('error: ')}")
    return json.loads(done.stdout)


def _up_arguments(arguments: SimulatorArguments, *more: str) -> UpArguments:
    flags = (f"--{name}={getattr(arguments, name)}" for name in ("topology", "model", "prefill", "decode"))
    return UpArguments.parse([*flags, *more])


def _vocabulary(arguments: SimulatorArguments) -> int:
    prefill, _ = _up_arguments(arguments).engines()
    return prefill.load_model_config().vocab_size


def _table(it: Compared) -> list[str]:
    """Of what was played several times the first counts that differ, and the median times."""
    lines = [f"{it.script:<20}{'mesh':>14}{'simulator':>14}{'':>10}"]
    for name, pairs in it.counts.items():
        real, simulated = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        lines.append(f"  {name:<18}{real:>14,}{simulated:>14,}{'' if real == simulated else 'differs':>10}")
    for name, pairs in it.times.items():
        real, simulated = (median(values) for values in zip(*pairs, strict=True))
        lines.append(f"  {name:<18}{real:>14.4f}{simulated:>14.4f}{it.errors[name]:>+10.1%}")
    return [*lines, ""]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
