"""`k3mesh sim`: a mesh in virtual time. Both schedulers are the real ones; all around them takes as long as the constants say.

k3mesh sim --requests 10000 --rate 6                                          Kimi K3 on 64 GPUs
k3mesh sim --scale 16 --rate 96 --requests 10000                              sixteen of that, 1,024 GPUs
k3mesh sim --workload FILE.jsonl --constants FILE.json --json
k3mesh sim --partitions 24,23,23,23 24,24,24,21 --requests 2000 --rate 7      the same requests for each partition
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.contracts.arguments import EngineArguments
from services.contracts.capacity import capacity_of
from services.contracts.flags import refusal
from services.contracts.machine import MachineArguments
from services.contracts.mesh import MeshArguments
from services.contracts.topologies import TopologyName
from services.simulate import constants, plots, workload
from services.simulate.costs import Costs
from services.simulate.kernels import KernelCosts
from services.simulate.measured import MeasuredCosts
from services.simulate.mesh import Mesh, Shape
from services.simulate.record import Record
from services.simulate.report import Report, comparison, report, table

MODELS = Path(__file__).resolve().parents[2] / "models"
PARTITIONS = "--partitions"


class SimArguments(MachineArguments, MeshArguments):
    """k3mesh sim."""

    topology: TopologyName = Field(default="k3", description="named argument sets of both engines")
    model: str = Field(
        default="", description="directory with config.json; Kimi K3's, or the demo model's on a laptop, if unset"
    )
    scale: int = Field(default=1, ge=1, le=64, description="so many pairs of engines; requests go to them in turn")
    workload: str = Field(default="", description="file of JSON lines: arrival_s, prompt_tokens, max_tokens")
    requests: int = Field(default=1000, ge=1, description="requests to draw, without a file")
    arrivals: Literal["poisson", "uniform", "burst"] = Field(default="poisson", description="how they arrive")
    rate: float = Field(default=5.0, gt=0, description="requests a second, over the whole mesh")
    lengths: str = Field(
        default="lognormal:3000:0.8:100000", description="prompt tokens: fixed:N, uniform:A:B, lognormal:MEDIAN:SIGMA[:MOST]"
    )
    outputs: str = Field(default="lognormal:400:0.7:8000", description="answer tokens, likewise")
    at_once: int = Field(default=0, ge=0, description="so many requests under way instead, whatever their times of arrival")
    lead: bool = Field(default=False, description="with --at-once: the first is alone until it has its first token")
    seed: int = Field(default=0, ge=0, description="of arrivals, lengths and the drafter's luck")
    constants: str = Field(
        default="", description="JSON file of the cost model; an H200's, or a small host's for CPU backends, if unset"
    )
    partitions: str = Field(
        default="", description="target layers of the stages, several to be compared: 24,23,23,23 24,24,24,21"
    )
    plots: str = Field(default="", description="HTML file to write with the run's pictures")

    @model_validator(mode="after")
    def _defaults(self) -> Self:
        if not self.constants:
            name = "h200" if self.topology == "k3" else "host"
            self.fill({"constants": str(constants.FOLDER / f"{name}.json")})
        return self

    @model_validator(mode="before")
    @classmethod
    def _model(cls, values: dict[str, object]) -> dict[str, object]:
        if not values.get("model"):
            values["model"] = str(MODELS / ("k3" if values.get("topology", "k3") == "k3" else "demo"))
        return values


def main(argv: list[str]) -> int:
    """Print what the run came to and return 0."""
    arguments = SimArguments.parse(_gather(argv), "k3mesh sim")
    asked = _asked(arguments)
    runs = {name: run(arguments, asked, name) for name in arguments.partitions.split() or [""]}
    mesh, records, first = next(iter(runs.values()))
    reports = {name: it for name, (_, _, it) in runs.items()}
    if arguments.plots:
        Path(arguments.plots).write_text(plots.page(mesh, records, first, reports))
    if arguments.as_json:
        result = first.as_dict()
        if len(runs) > 1:
            result["partitions"] = {name: it.as_dict() for name, it in reports.items()}
        print(json.dumps(result, indent=1))
    elif len(runs) > 1:
        print("\n".join(comparison(reports)))
    else:
        print("\n".join(table(first)))
    return 0


def run(arguments: SimArguments, asked: Sequence[workload.Asked], partition: str = "") -> tuple[Mesh, list[Record], Report]:
    """One run; `partition`: of the prefill engine's layers, as --pp-layer-partition."""
    if partition:
        more = f"{arguments.prefill} --pp-layer-partition {partition}"
        arguments = arguments.model_copy(update={"prefill": more})
    prefill, decode = arguments.engines()
    shape = shape_of(arguments, prefill, decode)
    mesh = Mesh(shape, costs_of(Path(arguments.constants), prefill, decode), arguments.scale, arguments.seed)
    records = mesh.run(asked, arguments.at_once or None, arguments.lead)
    return mesh, records, report(mesh, records)


def shape_of(arguments: SimArguments, prefill: EngineArguments, decode: EngineArguments) -> Shape:
    """What `k3mesh plan` says that fits."""
    p, d = (capacity_of(engine, arguments.memory_of(engine)) for engine in (prefill, decode))
    return Shape(prefill, decode, p.geometry, d.geometry, (p.blocks, p.slots), (d.blocks, d.slots))


def costs_of(path: Path, prefill: EngineArguments, decode: EngineArguments) -> Costs:
    """The cost model that the file's constants are for. ConfigError if one of them is missing."""
    values = constants.load(path)
    if values.model == "measured":
        return MeasuredCosts(values, prefill.pipeline_parallel_size)
    return KernelCosts(values, prefill, decode)


def _asked(arguments: SimArguments) -> list[workload.Asked]:
    a = arguments
    if a.workload:
        return workload.read(Path(a.workload))
    return workload.draw(a.requests, a.arrivals, a.rate, a.lengths, a.outputs, a.seed)


def _gather(argv: list[str]) -> list[str]:
    """`--partitions A B C` as one word, which is what a flag takes."""
    if PARTITIONS not in argv:
        return argv
    start = argv.index(PARTITIONS) + 1
    end = next((n for n in range(start, len(argv)) if argv[n].startswith("--")), len(argv))
    if start == end:
        raise refusal("partitions", "", "names no partition", "give each as 24,23,23,23, with spaces between them")
    return [*argv[:start], " ".join(argv[start:end]), *argv[end:]]
