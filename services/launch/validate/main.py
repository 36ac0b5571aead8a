"""`k3mesh validate`: the deployment guide's six validation steps, sized to the GPUs that are here, with a report.

A step that needs more GPUs says so and does what fewer can. On a CPU everything runs on reference kernels, with the demo model.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from k3mesh.errors import MeshError
from services.contracts.flags import refusal
from services.launch.scratch import scratch
from services.launch.validate import context, experts, graphs, load, requests, speculation
from services.launch.validate.report import Found, Step, check, environment, lines, write
from services.launch.validate.site import STEPS, Site, ValidateArguments

Run = Callable[[Site], Found]
RUNS: dict[int, tuple[str, Run]] = {
    1: ("routed experts and their dispatch", experts.run),
    2: ("replayed rounds against eager ones", graphs.run),
    3: ("the drafter's context over stages", context.run),
    4: ("prefill to decode, without and with speculation", speculation.run),
    5: ("requests of all kinds", requests.run),
    6: ("load", load.run),
}


def main(argv: list[str]) -> int:
    """Return 0 if no check failed."""
    arguments = ValidateArguments.parse(argv, "k3mesh validate")
    if unknown := [number for number in arguments.step if number not in STEPS]:
        raise refusal("step", unknown[0], "there is no such step", "give some of 1,2,3,4,5,6")
    gpus = 0 if arguments.device == "cpu" else torch.cuda.device_count()
    if arguments.device == "cuda" and not gpus:
        raise refusal("device", "cuda", "torch sees no NVIDIA GPU", "give cpu or auto")
    device = torch.cuda.get_device_name(0) if gpus else "CPU"
    steps: list[Step] = []
    with scratch("validate") as folder:
        for number in arguments.step:
            steps.append(_step(number, Site(arguments, gpus, folder)))
            print("\n".join(lines(steps[-1])), flush=True)
    name = arguments.name or device.lower().replace(" ", "-")
    versions = environment(f"{gpus} x {device}" if gpus else device)
    print(f"report: {write(Path(arguments.report), name, argv, steps, versions)}")
    return int(any(step.verdict == "failed" for step in steps))


def _step(number: int, site: Site) -> Step:
    """A step that cannot be finished has failed, and the others run all the same."""
    title, run = RUNS[number]
    print(f"step {number}, {title}", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        checks, data = run(site)
    except MeshError as error:
        checks, data = [check("the step runs to its end", error.message, passed=False)], {}
    return Step(number, title, checks, time.monotonic() - started, data)
