"""A run as pictures: one HTML file with SVG in it, which needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite

from services.simulate.mesh import Mesh
from services.simulate.record import Record
from services.simulate.report import Report

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 60, 34, 26
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
BINS = 120
Line = Sequence[tuple[float, float]]


def page(mesh: Mesh, records: Sequence[Record], report: Report, compared: Mapping[str, Report]) -> str:
    """TTFT and TPOT, throughput and load over time, stages; and the partitions side by side."""
    good = [it for it in records if not it.failure]
    stages = [f"stage {n}" for n in range(len(report.stage_utilisation))]
    charts = [
        lines("time to the first token", "s", "share of requests", {"TTFT": _cumulated([it.ttft for it in good])}),
        lines("time between tokens", "s", "share of requests", {"TPOT": _cumulated([it.tpot for it in good])}),
        lines("answer tokens per second", "s", "tokens/s", {"tokens/s": _throughput(mesh)}),
        lines("requests", "s", "at once", _load(records)),
        bars("prefill stages", {"busy": report.stage_utilisation, "bubbles": report.stage_bubbles}, stages),
        bars("NIC out", {"busy": report.nic_out_utilisation}, stages),
    ]
    if len(compared) > 1:
        busy = {name: it.stage_utilisation for name, it in compared.items()}
        charts.append(bars("busy by partition", busy, stages))
        times = {name: (it.ttft_p50_s, it.ttft_p99_s) for name, it in compared.items()}
        charts.append(bars("TTFT by partition, s", times, ["p50", "p99"], percent=False))
    return (
        "<!doctype html><meta charset='utf-8'><title>k3mesh sim</title>"
        "<style>body{font:14px sans-serif;margin:2em}svg{margin:8px;background:#fafafa}text{font:11px sans-serif}</style>"
        f"<h1>k3mesh sim: {report.requests:,} requests</h1>\n" + "\n".join(charts)
    )


# ---- series
def _cumulated(values: Sequence[float]) -> Line:
    ordered = sorted(value for value in values if isfinite(value))
    step = max(1, len(ordered) // 400)
    return [(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered) if n % step == 0 or n == len(ordered) - 1]


def _throughput(mesh: Mesh) -> Line:
    end = max(mesh.tokens_at, default=0) + 1
    width = max(1, -(-end // BINS))
    return [(start, sum(mesh.tokens_at[start + n] for n in range(width)) / width) for start in range(0, end, width)]


def _load(records: Sequence[Record]) -> dict[str, Line]:
    end = max((it.finished for it in records if isfinite(it.finished)), default=1.0)
    times = [end * n / BINS for n in range(BINS + 1)]
    spans = {
        "wait": [(it.sent, min(it.started, it.finished)) for it in records],
        "prefill": [(it.started, min(it.first_token, it.finished)) for it in records],
        "decode": [(it.first_token, it.finished) for it in records],
    }
    return {name: [(time, _open_at(pairs, time)) for time in times] for name, pairs in spans.items()}


def _open_at(spans: Sequence[tuple[float, float]], time: float) -> int:
    return sum(start <= time < end for start, end in spans)


# ---- charts
def lines(title: str, x: str, y: str, series: Mapping[str, Line]) -> str:
    points = [point for line in series.values() for point in line]
    most_x, most_y = (max((point[axis] for point in points), default=0.0) or 1.0 for axis in (0, 1))
    body: list[str] = []
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{_x(px / most_x):.1f},{_y(py / most_y):.1f}" for px, py in line)
        body.append(f"<polyline fill='none' stroke='{COLOURS[number % len(COLOURS)]}' stroke-width='1.5' points='{path}'/>")
        body.append(_legend(number, name))
    return _frame(title, body, [(share, f"{share * most_x:.3g}") for share in (0, 0.5, 1)], x, most_y, y)


def bars(title: str, series: Mapping[str, Sequence[float]], groups: Sequence[str], percent: bool = True) -> str:
    most = 1.0 if percent else max((value for values in series.values() for value in values), default=0.0) or 1.0
    body: list[str] = []
    for number, (name, values) in enumerate(series.items()):
        body.append(_legend(number, name))
        for group, value in enumerate(values):
            left = _x((group + 0.1 + 0.8 * number / len(series)) / len(groups))
            width = 0.8 / len(series) / len(groups) * (WIDTH - LEFT - 10)
            top = _y(value / most)
            colour = COLOURS[number % len(COLOURS)]
            body.append(f"<rect x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' height='{_y(0) - top:.1f}' fill='{colour}'/>")
    ticks = [((group + 0.5) / len(groups), name) for group, name in enumerate(groups)]
    return _frame(title, body, ticks, "", most, "share" if percent else "")


def _frame(title: str, body: Sequence[str], ticks: Sequence[tuple[float, str]], x: str, most: float, y: str) -> str:
    axes = f"<path d='M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - 10}' fill='none' stroke='#333'/>"
    words = [_text(_x(at), HEIGHT - BOTTOM + 14, text, "middle") for at, text in ticks]
    words += [_text(LEFT - 4, _y(at) + 4, f"{at * most:.3g}", "end") for at in (0, 0.5, 1)]
    words += [_text(WIDTH - 10, HEIGHT - 6, x, "end"), _text(4, TOP - 10, y), _text(WIDTH / 2, 14, title, "middle", True)]
    return f"<svg width='{WIDTH}' height='{HEIGHT}'>{axes}{''.join(words)}{''.join(body)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{weight}>{escape(text)}</text>"


def _legend(number: int, name: str) -> str:
    colour = COLOURS[number % len(COLOURS)]
    return f"<text x='{WIDTH - 14}' y='{TOP + 12 + 13 * number}' text-anchor='end' fill='{colour}'>{escape(name)}</text>"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - 10)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
