"""What a run came to: figures, and a table of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from typing import Any

from services.simulate.mesh import Cell, Mesh
from services.simulate.record import Record

RETRACTIONS = "retractions"  # the decode planner's count


@dataclass(frozen=True)
class Report:
    """One run. Seconds are virtual; shares are of the time from the first request to the last end, averaged over cells."""

    requests: int
    finished: int
    failed: int
    wall_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    queue_p50_s: float  # from its sending until decode has a place for it
    queue_p99_s: float
    wait_p50_s: float  # from there until its first chunk is launched
    wait_p99_s: float
    prefill_p50_s: float  # from there until its first token is chosen
    transfer_p50_s: float  # from there until decode has all of its cache
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s_per_node: float  # of the prefill nodes
    output_tokens_per_s_per_node: float  # of the decode nodes
    steps: int
    chunks: int
    rounds: int  # those that only clear places included
    tokens_per_row: float  # of a request's part of a round: 1 and the proposals that were right
    rounds_by_width: dict[int, int]
    live_per_replica: float
    padded_share: float  # of the rows that rounds computed
    transferred_bytes: int
    retractions: int
    capacity_aborts: int
    stage_utilisation: tuple[float, ...]
    stage_bubbles: tuple[float, ...]  # share of the time with a step in the pipeline in which the stage had none
    decode_utilisation: float
    nic_out_utilisation: tuple[float, ...]  # of one rank, by stage
    nic_in_utilisation: tuple[float, ...]  # by replica
    failures: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(mesh: Mesh, records: Sequence[Record]) -> Report:
    """Figures of the run that has ended."""
    good = [it for it in records if not it.failure and isfinite(it.finished)]
    wall = max((it.finished for it in records if isfinite(it.finished)), default=0.0) - min(it.sent for it in records)
    cells, shape = mesh.cells, mesh.shape
    nodes = [len(cells) * max(1, engine.nnodes) for engine in (shape.prefill, shape.decode)]
    prompts, outputs = sum(it.asked.prompt_tokens for it in good), sum(it.tokens for it in good)
    prompt_rate, output_rate = (tokens / wall if wall else 0.0 for tokens in (prompts, outputs))
    decodes = [cell.decode for cell in cells]
    live, padded = sum(it.live_rows for it in decodes), sum(it.padded_rows for it in decodes)
    rounds = sum(it.rounds for it in decodes)
    planned = sum(it.planner.totals["rounds"] for it in decodes)
    widths = sorted({width for it in decodes for width in it.widths})
    failures = [it.failure or "unfinished" for it in records if it.failure or not isfinite(it.finished)]
    return Report(
        requests=len(records),
        finished=len(good),
        failed=len(records) - len(good),
        wall_s=wall,
        **_percentiles("ttft", (it.ttft for it in good), 50, 90, 99),
        **_percentiles("tpot", (it.tpot for it in good), 50, 90, 99),
        **_percentiles("queue", (it.reserved - it.sent for it in good), 50, 99),
        **_percentiles("wait", (it.started - it.reserved for it in good), 50, 99),
        **_percentiles("prefill", (it.prefilled - it.started for it in good), 50),
        **_percentiles("transfer", (it.transferred - it.prefilled for it in good), 50),
        prompt_tokens=prompts,
        output_tokens=outputs,
        prompt_tokens_per_s=prompt_rate,
        output_tokens_per_s=output_rate,
        prompt_tokens_per_s_per_node=prompt_rate / nodes[0],
        output_tokens_per_s_per_node=output_rate / nodes[1],
        steps=sum(cell.prefill.steps for cell in cells),
        chunks=sum(cell.prefill.chunks for cell in cells),
        rounds=planned,
        tokens_per_row=(sum(it.tokens - 1 for it in records if it.tokens) / live) if live else 0.0,
        rounds_by_width={width: sum(it.widths.get(width, 0) for it in decodes) for width in widths},
        live_per_replica=live / (rounds * shape.decode.data_parallel_size) if rounds else 0.0,
        padded_share=1 - live / padded if padded else 0.0,
        transferred_bytes=sum(it.bytes for it in records),
        retractions=_total(cells, RETRACTIONS),
        capacity_aborts=_total(cells, "capacity_aborts"),
        stage_utilisation=_mean([[stage.busy / wall for stage in cell.prefill.stages] for cell in cells]),
        stage_bubbles=_mean([_bubbles(cell) for cell in cells]),
        decode_utilisation=_mean([[it.busy / wall] for it in decodes])[0],
        nic_out_utilisation=_mean([[busy / wall for busy in cell.network.out_busy] for cell in cells]),
        nic_in_utilisation=_mean([[busy / wall for busy in cell.network.in_busy] for cell in cells]),
        failures={code: failures.count(code) for code in sorted(set(failures))},
    )


def _bubbles(cell: Cell) -> list[float]:
    in_flight = cell.prefill.in_flight
    return [1 - stage.busy / in_flight if in_flight else 0.0 for stage in cell.prefill.stages]


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


def _total(cells: Iterable[Cell], name: str) -> int:
    return sum(cell.decode.planner.totals.get(name, 0) for cell in cells)


def _percentiles(name: str, values: Iterable[float], *percents: int) -> dict[str, float]:
    ordered = sorted(value for value in values if isfinite(value))
    return {f"{name}_p{percent}_s": percentile(ordered, percent) for percent in percents}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above; 0 without any."""
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def table(it: Report) -> list[str]:
    """Lines for a person."""
    widths = "  ".join(f"{width}: {count:,}" for width, count in it.rounds_by_width.items())
    stages = range(len(it.stage_utilisation))
    lines = [
        f"{it.requests:,} requests, {it.finished:,} finished, {it.failed:,} failed, in {it.wall_s:,.1f} s",
        "",
        f"{'seconds':<22}{'p50':>10}{'p90':>10}{'p99':>10}",
        f"{'TTFT':<22}{it.ttft_p50_s:>10.3f}{it.ttft_p90_s:>10.3f}{it.ttft_p99_s:>10.3f}",
        f"{'TPOT':<22}{it.tpot_p50_s:>10.4f}{it.tpot_p90_s:>10.4f}{it.tpot_p99_s:>10.4f}",
        f"{'queue for a place':<22}{it.queue_p50_s:>10.3f}{'':>10}{it.queue_p99_s:>10.3f}",
        f"{'wait for prefill':<22}{it.wait_p50_s:>10.3f}{'':>10}{it.wait_p99_s:>10.3f}",
        f"{'prefill':<22}{it.prefill_p50_s:>10.3f}",
        f"{'rest of the transfer':<22}{it.transfer_p50_s:>10.3f}",
        "",
        f"{'tokens per second':<22}{'all':>10}{'a node':>10}",
        f"{'prompts':<22}{it.prompt_tokens_per_s:>10,.0f}{it.prompt_tokens_per_s_per_node:>10,.0f}",
        f"{'answers':<22}{it.output_tokens_per_s:>10,.0f}{it.output_tokens_per_s_per_node:>10,.0f}",
        "",
        f"{'prefill stage':<22}" + "".join(f"{stage:>10}" for stage in stages),
        f"{'busy':<22}" + "".join(f"{share:>10.1%}" for share in it.stage_utilisation),
        f"{'bubbles':<22}" + "".join(f"{share:>10.1%}" for share in it.stage_bubbles),
        f"{'NIC out':<22}" + "".join(f"{share:>10.1%}" for share in it.nic_out_utilisation),
        "",
        f"{'decode replica':<22}" + "".join(f"{replica:>10}" for replica in range(len(it.nic_in_utilisation))),
        f"{'NIC in':<22}" + "".join(f"{share:>10.1%}" for share in it.nic_in_utilisation),
        f"rounds {it.rounds:,}, busy {it.decode_utilisation:.1%}, {it.live_per_replica:.1f} requests a replica, "
        f"{it.padded_share:.1%} of the rows padded, {it.tokens_per_row:.2f} tokens a request and round; by width {widths}",
        f"steps {it.steps:,} with {it.chunks:,} chunks; {it.transferred_bytes / 1e9:,.1f} GB handed over; "
        f"{it.retractions} retractions, {it.capacity_aborts} aborted for want of blocks",
    ]
    return lines + [f"failed, {code}: {count}" for code, count in it.failures.items()]


def comparison(reports: dict[str, Report]) -> list[str]:
    """One line for each partition."""
    heads = f"{'TTFT p50':>10}{'p99':>9}{'TPOT p50':>10}{'prompt tok/s':>14}{'answer tok/s':>14}"
    lines = [f"{'partition':<16}{heads}  busy by stage, bubbles"]
    for name, it in reports.items():
        busy = " ".join(f"{share:.1%}" for share in it.stage_utilisation)
        bubbles = " ".join(f"{share:.1%}" for share in it.stage_bubbles)
        lines.append(
            f"{name:<16}{it.ttft_p50_s:>10.3f}{it.ttft_p99_s:>9.3f}{it.tpot_p50_s:>10.4f}{it.prompt_tokens_per_s:>14,.0f}"
            f"{it.output_tokens_per_s:>14,.0f}  {busy}   {bubbles}"
        )
    return lines
