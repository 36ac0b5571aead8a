"""`k3mesh bench speculation`: two meshes for one model, one with a drafter and one without, side by side.

Both stay up and only one is driven at a time, in turn: what else the machine does meanwhile falls on both alike. Prompts are
answered greedily, so that both must give the same tokens. A mesh is a few percent faster or slower than its like for as long as
it lives, by where its memory happens to lie; so small differences take several pairs of meshes (--pairs).
"""

import asyncio
import contextlib
import json
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import Field

from k3mesh.client import Client
from k3mesh.errors import MeshError
from services.contracts.flags import FlagSet, Integers, refusal
from services.contracts.geometry import verify_widths
from services.contracts.mesh import MeshArguments
from services.contracts.topologies import LocalTopology
from services.launch import up
from services.launch.bench.load import Pass, Prompt, drive
from services.launch.child import ROOT
from services.launch.fits import check_engines
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.scratch import scratch
from services.launch.state import StateDir
from services.launch.tokenizer_files import SPECIAL_IDS

HELD_OUT = Path(__file__).with_name("held_out.json")
ALGORITHMS = {"dspark": "DSPARK", "nextn": "MTP"}
RANDOM_PROMPTS, RANDOM_LENGTHS = 24, (16, 100, 400, 900)
SEED = 1
WARM_UP = {"max_tokens": 8, "temperature": 0}


class SpeculationArguments(FlagSet):
    """k3mesh bench speculation."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    model: str = Field(default=str(ROOT / "models" / "demo"), description="checkpoint; the demo model if unset")
    algorithm: Literal["dspark", "nextn"] = Field(default="dspark", description="drafter")
    draft_model: str = Field(default="", description="the DSpark drafter's checkpoint; MODEL/dspark if unset")
    width: int = Field(default=8, ge=2, description="verify width, the anchor included")
    prompts: str = Field(
        default=str(HELD_OUT), description="JSON file with prompts, as held_out.json beside this command has them"
    )
    adversarial: bool = Field(default=False, description="random token ids instead, which no drafter can foresee")
    random_lengths: Integers = Field(default=RANDOM_LENGTHS, description="tokens of the adversarial prompts, in turn")
    temperature: float = Field(default=0.0, ge=0, description="answers are sampled, with a seed that is the same on both sides")
    adaptive: bool = Field(
        default=False,
        description="rounds narrow where the full width costs more than it brings, as a mesh's do by default; --adversarial "
        "implies it",
    )
    num_prompts: int = Field(default=0, ge=0, description="so many of the prompts, from the first; 0: all")
    max_tokens: int = Field(default=64, ge=2, description="length of an answer, at most")
    concurrency: int = Field(default=4, ge=1, description="prompts at a time")
    repeats: int = Field(default=3, ge=1, description="how often each mesh answers all prompts; medians are told")
    pairs: int = Field(default=1, ge=1, description="pairs of meshes, one after the other, each with all the repeats")
    topology: LocalTopology = Field(default="laptop", description="as of `k3mesh up`")
    prefill: str = Field(default="", description="more flags of both prefill engines, as of `k3mesh up`")
    decode: str = Field(default="", description="more flags of both decode engines, likewise")
    as_json: bool = Field(default=False, description="print one JSON object instead of a table")

    @property
    def adapts(self) -> bool:
        return self.adaptive or self.adversarial


@dataclass(frozen=True)
class Result:
    """What was measured. Medians are over the passes, totals their sum."""

    model: str
    algorithm: str
    width: int
    adversarial: bool
    temperature: float
    adaptive: bool
    prompts: int
    concurrency: int
    repeats: int
    pairs: int
    max_tokens: int
    tokens: int  # of one pass
    acceptance_length: float  # tokens of a request and round with proposals, the one that needs no drafter included
    acceptance_per_position: list[float]  # of windows that had a k-th proposal, those whose first k were right; k from 1
    tokens_drafted: int
    tokens_accepted: int
    tokens_per_s_on: float
    tokens_per_s_off: float
    ratio: float  # median of the ratios of neighbouring passes
    ratios: list[float]
    rounds_on: int
    rounds_off: int
    rounds_by_width: dict[int, int]  # of a replica with requests, speculation on
    greedy_identical: bool
    differing_answers: int


def main(argv: list[str]) -> int:
    """Return 0 if both meshes gave the same tokens, 1 if greedy ones differ: a sampled one may where a coin falls on the edge
    that a batch's rounding moves. Logs stay behind only after a failure."""
    arguments = SpeculationArguments.parse(argv, "k3mesh bench speculation")
    prompts = _prompts(arguments)
    fixed = "" if arguments.adapts else "--no-speculative-adaptive"
    measured = _Measured()
    for _ in range(arguments.pairs):
        with (
            scratch("bench") as folder,
            _mesh(arguments, folder / "on", _drafter(arguments), fixed) as on,
            _mesh(arguments, folder / "off", "") as off,
        ):
            asyncio.run(_measure(arguments, prompts, {"on": on, "off": off}, measured))
    result = _result(arguments, measured)
    print(json.dumps(asdict(result)) if arguments.as_json else "\n".join(_table(result)))
    if not result.greedy_identical and not result.temperature:
        message = f"{result.differing_answers} of {result.prompts} answers differ between speculation on and off"
        raise MeshError(f"{message}; speculation must not change a greedy token")
    return 0


def _drafter(arguments: SpeculationArguments) -> str:
    """The flags that switch speculation on."""
    flags = ["--speculative-algorithm", ALGORITHMS[arguments.algorithm], "--speculative-num-draft-tokens", str(arguments.width)]
    if arguments.algorithm == "dspark":
        drafter = Path(arguments.draft_model or Path(arguments.model) / "dspark").resolve()
        flags += ["--speculative-draft-model-path", str(drafter)]
    return shlex.join(flags)


@contextlib.contextmanager
def _mesh(arguments: SpeculationArguments, folder: Path, drafter: str, decode: str = "") -> Iterator[StateDir]:
    """A mesh on free ports for as long as the block lasts, or this process. `decode`: more flags of that engine."""
    named = {"model": arguments.model, "topology": arguments.topology, "state_dir": str(folder)}
    engines = {"prefill": f"{arguments.prefill} {drafter}".strip(), "decode": f"{arguments.decode} {drafter} {decode}".strip()}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**named, **engines}.items()]
    up_arguments = UpArguments.parse([*words, "--port", str(free_ports(1)[0])])
    check_engines(up_arguments.engines())  # refuses what is wrong before any process starts
    _tell(f"starting a mesh {'with' if drafter else 'without'} speculation")
    with up.attached(up_arguments):
        yield StateDir(folder)


class _Measured:
    """Passes in the order in which they were driven, and what the decode schedulers counted meanwhile, by side."""

    def __init__(self) -> None:
        self.passes: dict[str, list[Pass]] = {"on": [], "off": []}
        self.counted: dict[str, Counter[str]] = {"on": Counter(), "off": Counter()}


async def _measure(
    arguments: SpeculationArguments, prompts: Sequence[Prompt], sides: dict[str, StateDir], measured: _Measured
) -> None:
    """Drive a pair of meshes in turn: on off, off on, on off …, after a short pass of each that does not count."""
    options: dict[str, Any] = {
        "max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": SEED,
        "ignore_eos": arguments.adversarial,
    }  # fmt: skip
    for side in sides.values():
        await drive(side.addresses()["url"], prompts[: arguments.concurrency], arguments.concurrency, **WARM_UP)
    before = {name: await _totals(side) for name, side in sides.items()}
    for repeat in range(arguments.repeats):
        for name in ("on", "off") if repeat % 2 == 0 else ("off", "on"):
            done = await drive(sides[name].addresses()["url"], prompts, arguments.concurrency, **options)
            measured.passes[name].append(done)
            speed = f"{done.tokens} tokens in {done.seconds:.1f} s, {done.tokens_per_s:.1f} tokens/s"
            _tell(f"pass {repeat + 1} of {arguments.repeats}, speculation {name}: {speed}")
    for name, side in sides.items():
        measured.counted[name].update(await _totals(side))
        measured.counted[name].subtract(before[name])


async def _totals(side: StateDir) -> dict[str, int]:
    """What the decode scheduler has counted since its start."""
    addresses = side.addresses()
    async with Client(addresses["prefill-0"]["scheduler"]) as client:
        return (await client.inspect("decode-scheduler", addresses["decode-0"]["scheduler"])).totals


def _result(arguments: SpeculationArguments, measured: _Measured) -> Result:
    passes, on, off = measured.passes, measured.counted["on"], measured.counted["off"]
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(passes["on"], passes["off"], strict=True)]
    truth, *others = [done.answers for done in (*passes["off"], *passes["on"])]
    differing = sum(any(answers[index] != answer for answers in others) for index, answer in enumerate(truth))
    return Result(
        model=arguments.model,
        algorithm=arguments.algorithm,
        width=arguments.width,
        adversarial=arguments.adversarial,
        temperature=arguments.temperature,
        adaptive=arguments.adapts,
        prompts=len(truth),
        concurrency=arguments.concurrency,
        repeats=arguments.repeats,
        pairs=arguments.pairs,
        max_tokens=arguments.max_tokens,
        tokens=passes["off"][0].tokens,
        acceptance_length=round(1 + on["tokens_accepted"] / max(1, on["windows"]), 4),
        acceptance_per_position=[
            round(on[f"accepted_at_{k}"] / max(1, on[f"drafted_at_{k}"]), 4) for k in range(1, arguments.width)
        ],
        tokens_drafted=on["tokens_drafted"],
        tokens_accepted=on["tokens_accepted"],
        tokens_per_s_on=round(median(done.tokens_per_s for done in passes["on"]), 3),
        tokens_per_s_off=round(median(done.tokens_per_s for done in passes["off"]), 3),
        ratio=round(median(ratios), 4),
        ratios=[round(ratio, 4) for ratio in ratios],
        rounds_on=on["rounds"],
        rounds_off=off["rounds"],
        rounds_by_width={width: on[f"rounds_of_width_{width}"] for width in verify_widths(arguments.width)},
        greedy_identical=not differing,
        differing_answers=differing,
    )


def _prompts(arguments: SpeculationArguments) -> list[Prompt]:
    """ConfigError if the file or the model's config.json cannot be read."""
    if arguments.adversarial:
        prefill, decode = MeshArguments.parse(["--model", arguments.model]).engines()
        check_engines((prefill, decode))
        ids = prefill.load_model_config().vocab_size - SPECIAL_IDS
        drawn = random.Random(1)
        lengths = (arguments.random_lengths * RANDOM_PROMPTS)[: arguments.num_prompts or RANDOM_PROMPTS]
        prompts = [Prompt([drawn.randrange(ids) for _ in range(length)]) for length in lengths]
    else:
        try:
            read = json.loads(Path(arguments.prompts).read_text())["prompts"]
            prompts = [Prompt(it.get("text", ""), it.get("chat", "")) for it in read]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"cannot be read ({error})"
            raise refusal("prompts", arguments.prompts, rule, f"give a JSON file such as {HELD_OUT}") from None
    return prompts[: arguments.num_prompts or None]


def _table(it: Result) -> list[str]:
    asked = f"{it.prompts} {'adversarial ' if it.adversarial else ''}prompts"
    widths = "  ".join(f"{width}: {count}" for width, count in it.rounds_by_width.items())
    positions = "  ".join(f"{k}: {share:.1%}" for k, share in enumerate(it.acceptance_per_position, 1))
    passes = it.pairs * it.repeats
    same = "identical" if it.greedy_identical else f"{it.differing_answers} answers differ"
    return [
        f"{it.model}, {it.algorithm}, width {it.width}: {asked}, {it.concurrency} at a time, {passes} passes of each",
        "",
        f"{'speculation':<20}{'on':>10}{'off':>10}{'on / off':>10}",
        f"{'tokens per second':<20}{it.tokens_per_s_on:>10.1f}{it.tokens_per_s_off:>10.1f}{it.ratio:>10.2f}",
        f"{'rounds':<20}{it.rounds_on:>10}{it.rounds_off:>10}",
        "",
        f"acceptance length    {it.acceptance_length:.2f} tokens a round, {it.tokens_accepted} of {it.tokens_drafted} right",
        f"first k were right   {positions}",
        f"rounds of width      {widths}",
        f"greedy tokens        {same}" if not it.temperature else f"sampled tokens       {same}",
    ]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
