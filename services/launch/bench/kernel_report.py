"""The report of `k3mesh bench kernels`: a table, the sums over a layer, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from services.launch.bench.kernel_cases import CONTEXT, LINEAR, REQUESTS, WIDTH

if TYPE_CHECKING:
    from services.launch.bench.kernels import Result, Time

EXPERTS = "prepare_experts"
HEADER = ("op", "shape", "backend", "time µs", "floor µs", "over floor", "")


def table(result: Result) -> Iterator[str]:
    """Lines of plain text."""
    copy, matrix = result.ceilings.copy_gb_per_s, result.ceilings.matrix_tflop_per_s
    yield f"{result.device}: copy {copy:.0f} GB/s, matrix {matrix:.0f} TFLOP/s"
    rows = [HEADER, *map(_row, result.times)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        words = [
            f"{word:<{width}}" if n < 3 or n == 6 else f"{word:>{width}}"
            for n, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
    yield from layer_sums(result.times)
    for name, reason in result.refused.items():
        yield f"not timed: {name}: {reason}"


def markdown(result: Result) -> str:
    lines = [
        f"# Kernels on {result.device}",
        "",
        f"`k3mesh bench kernels {' '.join(result.arguments)}`, {result.date}. "
        + ", ".join(f"{name} {version}" for name, version in result.versions.items())
        + ".",
        "",
        f"Ceilings measured in this run: copy {result.ceilings.copy_gb_per_s:.0f} GB/s (bytes read and written), matrix "
        f"product {result.ceilings.matrix_tflop_per_s:.0f} TFLOP/s (bfloat16, random data). A floor is the larger of an op's "
        "fewest bytes and its operations over these. Times are medians of graph replays, gaps between kernels included; *call "
        "by call* where a backend cannot be captured.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---|---|---|---:|---:|---:|---|",
        *("| " + " | ".join(_row(time)) + " |" for time in result.times),
        "",
        *(f"- {line}" for line in layer_sums(result.times)),
        *(f"- Not timed: {name}: {reason}" for name, reason in result.refused.items()),
    ]
    return "\n".join(lines) + "\n"


def layer_sums(times: list[Time]) -> Iterator[str]:
    """What a layer of a verify round takes beside its routed experts, with the first backend that is timed for each shape."""
    first: dict[tuple[str, str], Time] = {}
    for time in times:
        first.setdefault((time.op, time.what), time)

    def total(calls: Callable[[Time], int], wanted: Callable[[Time], bool]) -> float:
        return sum(calls(time) * time.time_us for time in first.values() if wanted(time))

    counts: dict[str, Callable[[Time], int]] = {
        "KDA": lambda time: time.calls_in_kda_layer,
        "MLA": lambda time: time.calls_in_mla_layer,
    }
    for kind, calls in counts.items():
        ops = total(calls, lambda time: time.op not in (LINEAR, EXPERTS))
        linear = total(calls, lambda time: time.op == LINEAR)
        experts = total(calls, lambda time: time.op == EXPERTS)
        line = (
            f"{kind} layer, {REQUESTS} x {WIDTH} rows, {CONTEXT:,} in the cache: ops {ops:.0f} µs, projections {linear:.0f} µs"
        )
        if experts:
            line += f", routed experts {experts:.0f} µs; ops over experts {ops / experts:.2f}"
        yield line


def _row(time: Time) -> tuple[str, ...]:
    notes: list[str] = []
    if time.bar is not None:
        notes.append(f"bar {time.bar:g}: {'met' if time.over_floor <= time.bar else 'missed'}")
    if not time.graph:
        notes.append("call by call")
    return (
        time.op,
        time.what,
        time.backend,
        f"{time.time_us:.1f}",
        f"{time.floor_us:.1f}",
        f"{time.over_floor:.2f}",
        ", ".join(notes),
    )
