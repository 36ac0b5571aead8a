"""What the simulated mesh is asked: requests from a file, or drawn from standard distributions with a seed."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from k3mesh.errors import ConfigError
from services.contracts.flags import refusal


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `output_tokens` is how long its answer is; the simulator knows no text."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""  # of whose prompts the first `prefix_tokens` are the same
    prefix_tokens: int = 0


def read(path: Path) -> list[Asked]:
    """JSON lines with arrival_s, prompt_tokens and max_tokens (or output_tokens), and if prompts share a beginning prefix and
    prefix_tokens. ConfigError names file and line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise refusal("workload", path, rule, "give a file of JSON lines") from None
    asked = [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise refusal("workload", path, "has no request", "give at least one line")
    return sorted(asked, key=lambda it: it.arrival_s)


def _read(line: str, where: str) -> Asked:
    try:
        it = cast(dict[str, Any], json.loads(line))
        output = it.get("output_tokens", it.get("max_tokens"))
        asked = Asked(
            float(it.get("arrival_s", 0.0)), int(it["prompt_tokens"]), int(cast(Any, output)),
            str(it.get("prefix", "")), int(it.get("prefix_tokens", 0)),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--workload {where}: {error!r}; a line is an object with arrival_s, prompt_tokens and max_tokens", param="workload"
        ) from None
    if asked.arrival_s < 0 or asked.prompt_tokens < 1 or asked.output_tokens < 1:
        raise ConfigError(f"--workload {where}: {asked}: times are not negative, lengths at least 1", param="workload")
    return asked


def lengths(spec: str, field: str) -> Callable[[Random], int]:
    """A distribution of token counts by its spelling: `fixed:N`, `uniform:LOW:HIGH`, `lognormal:MEDIAN:SIGMA[:MOST]`."""
    name, *words = spec.split(":")
    try:
        numbers = [float(word) for word in words]
        if name == "fixed" and len(numbers) == 1 and numbers[0] >= 1:
            return lambda rng: int(numbers[0])
        if name == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
            return lambda rng: rng.randint(int(numbers[0]), int(numbers[1]))
        if name == "lognormal" and len(numbers) in (2, 3) and numbers[0] >= 1 and numbers[1] >= 0:
            most = numbers[2] if len(numbers) == 3 else math.inf
            return lambda rng: max(1, int(min(most, rng.lognormvariate(math.log(numbers[0]), numbers[1]))))
    except ValueError:
        pass
    remedy = "give fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"
    raise refusal(field, spec, "is no distribution of token counts", remedy)


def arrivals(kind: str, rate: float, rng: Random) -> Iterator[float]:
    """Times of arrival: `poisson` with `rate` requests a second on average, `uniform` with equal gaps, `burst` all at once."""
    time = 0.0
    while True:
        yield time
        if kind == "poisson":
            time += rng.expovariate(rate)
        elif kind == "uniform":
            time += 1 / rate


def draw(count: int, kind: str, rate: float, prompts: str, outputs: str, seed: int) -> list[Asked]:
    """`count` requests; equal arguments give equal requests."""
    prompt, output, rng = lengths(prompts, "lengths"), lengths(outputs, "outputs"), Random(seed)
    times = arrivals(kind, rate, Random(f"{seed}/arrivals"))
    return [Asked(next(times), prompt(rng), output(rng)) for _ in range(count)]
