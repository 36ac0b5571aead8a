"""`k3mesh bench simulator`: a mesh and its simulation answer the same scripts; counts must be equal, times are compared.

Two meshes run one after the other. The first has no prefix cache: what its steps and rounds take becomes the simulator's
constants (--constants keeps them), and it plays the script whose requests come all at once. The second is as by default and
plays the others. A script is such that its counts do not depend on time: prompts are multiples of a batch, or one answer
outlasts all others. `k3mesh sim` then plays the same script with these constants.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
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
    repeats: int = Field(default=3, ge=1, description="how often the mesh plays each script; medians of the times are told")
    as_json: bool = Field(default=False, description="print one JSON object instead of a table")


@dataclass(frozen=True)
class Compared:
    """One script: counts of the mesh and of the simulator, and their times."""

    script: str
    counts: dict[str, tuple[int, int]]
    times: dict[str, tuple[float, float]]

    @property
    def equal(self) -> bool:
        return all(real == simulated for real, simulated in self.counts.values())

    @property
    def worst(self) -> float:
        """The largest relative error of a time."""
        return max(abs(simulated / real - 1) for real, simulated in self.times.values())


def main(argv: list[str]) -> int:
    """Return 0 if every count is equal; MeshError if one differs."""
    arguments = SimulatorArguments.parse(argv, "k3mesh bench simulator")
    with scratch("bench") as folder:
        constants = Path(arguments.constants or folder / "constants.json")
        compared: list[Compared] = []
        with _mesh(arguments, folder / "uncached", NO_CACHE) as state:
            content = asyncio.run(_calibrated(arguments, state))
            constants.write_text(json.dumps(content, indent=1) + "\n")
            compared.append(_compare(arguments, state, BURST, constants, NO_CACHE))
        with _mesh(arguments, folder / "cached", "") as state:
            compared += [_compare(arguments, state, script, constants, "") for script in (SEQUENTIAL, COVERED)]
    if arguments.as_json:
        print(json.dumps([{**asdict(it), "equal": it.equal, "worst": it.worst} for it in compared]))
    else:
        print("\n".join(line for it in compared for line in _table(it)))
    if different := [it.script for it in compared if not it.equal]:
        raise MeshError(f"the simulator counts otherwise than the mesh in {', '.join(different)}")
    return 0


@contextmanager
def _mesh(arguments: SimulatorArguments, folder: Path, prefill: str):
    """A mesh for as long as the block lasts, or this process; it has played a warm-up."""
    named = {"topology": arguments.topology, "model": arguments.model, "state_dir": str(folder), "decode": arguments.decode}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()]
    words += [f"--prefill={arguments.prefill} {prefill}".rstrip(), "--port", str(free_ports(1)[0])]
    _tell(f"starting a mesh {prefill}".rstrip())
    with up.attached(UpArguments.parse(words)):
        state = StateDir(folder)
        asyncio.run(play(state, WARM_UP, _vocabulary(arguments), seed=0))
        yield state


async def _calibrated(arguments: SimulatorArguments, state: StateDir) -> dict[str, Any]:
    plays: dict[str, Play] = {}
    for script in calibrate.SCRIPTS:
        _tell(f"calibrating: {script.name}")
        plays[script.name] = await play(state, script, _vocabulary(arguments), seed=1)
    processors = len(os.sched_getaffinity(0))
    _, decode = _up_arguments(arguments).engines()
    seen = calibrate.Seen(plays, await message_seconds(state), processors, decode.data_parallel_size)
    where = f"k3mesh bench simulator: {Path(arguments.model).name}, {arguments.topology}, {processors} cores"
    return calibrate.constants(seen, where)


def _compare(arguments: SimulatorArguments, state: StateDir, script: Script, constants: Path, prefill: str) -> Compared:
    """The mesh's counts are those of the first time, of which each has the same."""
    _tell(f"playing {script.name}, {arguments.repeats} times")
    plays = [asyncio.run(play(state, script, _vocabulary(arguments), seed)) for seed in range(2, 2 + arguments.repeats)]
    simulated = _simulate(arguments, script, constants, prefill)
    real = [_counts(it) for it in plays]
    if any(counts != real[0] for counts in real):
        raise MeshError(f"{script.name}: the mesh itself counts differently each time: {real}")
    times = [{"wall_s": it.seconds, "ttft_p50_s": it.ttft, "tpot_p50_s": it.tpot} for it in plays]
    middle = {name: sorted(each[name] for each in times)[len(times) // 2] for name in TIMES}
    return Compared(
        script.name,
        {name: (real[0][name], simulated[name]) for name in COUNTS},
        {name: (middle[name], simulated[name]) for name in TIMES},
    )


def _counts(it: Play) -> dict[str, int]:
    stages = max(stage for stage, *_ in it.requests[0].chunks) + 1
    return {
        "steps": it.prefill["steps"],
        "chunks": sum(len(request.chunks) for request in it.requests) // stages,
        "rounds": it.decode["rounds"],
        "transferred_bytes": sum(int(request.ledger["bytes_sent"]) for request in it.requests),
        "retractions": it.decode.get("retractions", 0),
        "capacity_aborts": it.decode["capacity_aborts"],
    }


def _simulate(arguments: SimulatorArguments, script: Script, constants: Path, prefill: str) -> Mapping[str, Any]:
    workload = constants.with_name(f"{script.name}.jsonl")
    workload.write_text(script.lines())
    named = {
        "topology": arguments.topology, "model": arguments.model, "workload": workload, "constants": constants,
        "at-once": script.at_once, "prefill": f"{arguments.prefill} {prefill}".strip(), "decode": arguments.decode,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in named.items()]
    command = [sys.executable, "-m", "k3mesh.cli.main", "sim", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    workload.unlink()
    if done.returncode:
        raise MeshError(f"k3mesh sim: {done.stderr.strip().removeprefix('error: ')}")
    return json.loads(done.stdout)


def _up_arguments(arguments: SimulatorArguments) -> UpArguments:
    flags = (f"--{name}={getattr(arguments, name)}" for name in ("topology", "model", "prefill", "decode"))
    return UpArguments.parse(list(flags))


def _vocabulary(arguments: SimulatorArguments) -> int:
    prefill, _ = _up_arguments(arguments).engines()
    return prefill.load_model_config().vocab_size


def _table(it: Compared) -> list[str]:
    lines = [f"{it.script:<20}{'mesh':>14}{'simulator':>14}{'':>10}"]
    for name, (real, simulated) in it.counts.items():
        lines.append(f"  {name:<18}{real:>14,}{simulated:>14,}{'' if real == simulated else 'differs':>10}")
    for name, (real, simulated) in it.times.items():
        lines.append(f"  {name:<18}{real:>14.4f}{simulated:>14.4f}{simulated / real - 1:>+10.1%}")
    return [*lines, ""]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
