"""`k3mesh bench kernels`: each op's time over its own floor on one GPU, at the shapes that a rank of Kimi K3 sees.

The ceilings under the floors are measured in the same run. A call's time is that of a captured graph of many, so the gap
between two kernels is in it; a backend that cannot be captured is timed call by call and marked.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

from k3mesh.errors import ConfigError
from kernels.registry import AUTO, CANDIDATES, REFERENCE, Candidate, resolve
from services.contracts.flags import FlagSet, Words
from services.launch.bench.expert_cases import expert_cases
from services.launch.bench.kernel_cases import LINEAR, Case, op_cases
from services.launch.bench.kernel_report import markdown, table
from services.launch.bench.kernel_times import Ceilings, graph_microseconds, measure_ceilings, microseconds

PACKAGES = ("torch", "triton", "tokenspeed-flashmla", "tokenspeed-flashkda", "tokenspeed-deepep", "tokenspeed-kernel")


class KernelArguments(FlagSet):
    """k3mesh bench kernels."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    ops: Words = Field(default=(), description="these ops alone; all without it")
    backends: Literal["auto", "fast", "all"] = Field(
        default="auto", description="auto: the one that is chosen; fast: every one but the reference; all: every one"
    )
    report: Path | None = Field(default=None, description="folder that gets the report, as Markdown and as JSON")
    as_json: bool = Field(default=False, description="print one JSON object")


@dataclass(frozen=True, slots=True)
class Time:
    """One case with one backend."""

    op: str
    what: str
    backend: str
    time_us: float
    floor_us: float
    over_floor: float
    bar: float | None
    graph: bool  # timed in a captured graph
    calls_in_kda_layer: int
    calls_in_mla_layer: int


@dataclass(frozen=True, slots=True)
class Result:
    """All of them, and where they were measured."""

    device: str
    ceilings: Ceilings
    times: list[Time]
    refused: dict[str, str]  # case and backend -> why it was not timed
    versions: dict[str, str]
    arguments: list[str]
    date: str


def all_cases() -> Iterator[Case]:
    yield from op_cases()
    yield from expert_cases()


def main(argv: list[str]) -> int:
    """Return 0 when everything that the device supports is measured. ConfigError without a GPU."""
    arguments = KernelArguments.parse(argv, "k3mesh bench kernels")
    unknown = set(arguments.ops) - {*CANDIDATES, LINEAR}
    if unknown:
        raise ConfigError(f"--ops {','.join(sorted(unknown))}: no such op; choose from {', '.join([*CANDIDATES, LINEAR])}")
    if not torch.cuda.is_available():
        raise ConfigError("k3mesh bench kernels needs an NVIDIA GPU, and torch sees none here; see nvidia-smi and docs/gpu.md")
    result = measure(arguments, torch.device("cuda", torch.cuda.current_device()), argv)
    if arguments.report is not None:
        arguments.report.mkdir(parents=True, exist_ok=True)
        name = f"kernels-{result.device.split()[-1].lower()}"
        (arguments.report / f"{name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        (arguments.report / f"{name}.md").write_text(markdown(result))
    print(json.dumps(asdict(result)) if arguments.as_json else "\n".join(table(result)))
    return 0


@torch.inference_mode()
def measure(a: KernelArguments, device: torch.device, argv: list[str]) -> Result:
    ceilings, times, refused = measure_ceilings(device), list[Time](), dict[str, str]()
    for case in all_cases():
        if a.ops and case.op not in a.ops:
            continue
        for candidate in _candidates(case, device, a.backends):
            reason = candidate.supports(device, case.geometry)
            if reason is None:
                try:
                    times.append(_time(case, candidate, device, ceilings))
                except Exception as error:  # one kernel's failure is a line of the report; the others are measured
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if reason is not None:
                refused[f"{case.name}, {candidate.backend}"] = reason
            torch.cuda.empty_cache()
    return Result(
        device=torch.cuda.get_device_name(device),
        ceilings=ceilings,
        times=times,
        refused=refused,
        versions=dict(_versions()),
        arguments=argv,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _candidates(case: Case, device: torch.device, which: str) -> list[Candidate]:
    if case.op == LINEAR:
        return [Candidate("library", lambda: torch.nn.functional.linear, lambda *_: None)]
    if which == "auto":
        chosen = resolve(case.op, device, case.geometry, AUTO).backend
        return [it for it in CANDIDATES[case.op] if it.backend == chosen]
    return [it for it in CANDIDATES[case.op] if which == "all" or it.backend != REFERENCE]


def _time(case: Case, candidate: Candidate, device: torch.device, ceilings: Ceilings) -> Time:
    print(f"{case.name}, {candidate.backend}", file=sys.stderr, flush=True)
    calls = case.prepare(candidate.load(), device)
    graph = candidate.backend != REFERENCE  # whose loops ask the device how long sequences are
    time_us = (graph_microseconds if graph else microseconds)(calls) / case.layers
    floor_us = ceilings.floor_us(case.bytes, case.flops)
    return Time(
        op=case.op,
        what=case.what,
        backend=candidate.backend,
        time_us=round(time_us, 2),
        floor_us=round(floor_us, 2),
        over_floor=round(time_us / floor_us, 2),
        bar=case.bar,
        graph=graph,
        calls_in_kda_layer=case.kda,
        calls_in_mla_layer=case.mla,
    )


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "cuda", str(torch.version.cuda)
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    yield "driver", subprocess.run(driver, capture_output=True, text=True, check=False).stdout.strip()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
