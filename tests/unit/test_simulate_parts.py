"""The simulator's parts: virtual time, shared processors, wires, workloads, constants."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from k3mesh.errors import ConfigError
from services.contracts.events import DeadlinePassed
from services.simulate import constants, workload
from services.simulate.constants import FOLDER, interpolate
from services.simulate.costs import Contention
from services.simulate.network import Network, Part
from services.simulate.report import percentile
from services.simulate.timeline import PlannerTurns, SharedProcessors, Timeline, Work
from tests.lib.simulation import constants_file


class Recorder:
    """A planner that notes what it gets, and plans once after each event."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.deadline: float | None = None
        self._plans = 0

    def apply(self, event: Any, now: float) -> list[Any]:
        self.seen.append((now, event))
        self._plans = 1
        if isinstance(event, DeadlinePassed):
            self.deadline = None
        return [event]

    def plan(self, now: float) -> Any | None:
        self._plans -= 1
        return None if self._plans < 0 else f"plan at {now:g}"

    def next_deadline(self) -> float | None:
        return self.deadline


def turns(timeline: Timeline) -> tuple[Recorder, PlannerTurns, list[Any]]:
    planner, launched = Recorder(), list[Any]()
    it = PlannerTurns(timeline, planner)
    it.launch = launched.append
    return planner, it, launched


def test_a_planner_takes_all_events_of_a_moment_in_order_and_plans_once_after_them():
    timeline = Timeline()
    planner, it, launched = turns(timeline)
    timeline.at(1.0, lambda: it.post("a"))
    it.post("b", at=1.0)
    timeline.at(1.0, lambda: it.post("c"))
    it.post("d", at=2.0)
    timeline.run()
    assert planner.seen == [(1.0, "a"), (1.0, "b"), (1.0, "c"), (2.0, "d")]
    assert launched == ["plan at 1", "plan at 2"]


def test_a_deadline_comes_when_it_is_due_even_if_it_moved_forward():
    timeline = Timeline()
    planner, it, _ = turns(timeline)
    planner.deadline = 5.0
    it.post("a", at=1.0)
    timeline.at(2.0, lambda: setattr(planner, "deadline", 3.0))
    it.post("b", at=2.0)
    timeline.run()
    assert [time for time, event in planner.seen if isinstance(event, DeadlinePassed)] == [3.0]


def test_work_is_as_fast_as_what_else_is_done_lets_it():
    timeline, done = Timeline(), dict[str, float]()
    beside = Contention(stages=((1, 1.0), (3, 1.5)), stages_beside=((1, 0.8), (3, 1.2)), round_beside=((1, 0.5), (3, 0.25)))
    processors = SharedProcessors(timeline, beside.speeds)

    def start(work: Work, name: str, seconds: float) -> None:
        processors.run(work, seconds, lambda: done.update({name: timeline.now}))

    timeline.at(0.0, start, Work.STAGE, "alone", 1.0)
    for name in ("x", "y"):
        timeline.at(2.0, start, Work.STAGE, name, 1.0)  # 1.25 together
    timeline.at(10.0, start, Work.ROUND, "round", 1.0)
    timeline.at(10.0, start, Work.STAGE, "beside", 0.8)  # for a second, in which half of the round is done
    timeline.run()
    assert done["alone"] == 1.0
    assert [done[name] for name in "xy"] == [pytest.approx(2.0 + 2 / 1.25)] * 2
    assert (done["beside"], done["round"]) == (pytest.approx(11.0), pytest.approx(11.5))


def test_more_stages_than_were_measured_are_as_fast_together_as_those():
    speeds = Contention(((1, 1.0), (2, 1.5)), ((1, 0.5), (2, 0.6)), ((1, 0.5), (2, 0.4))).speeds
    assert speeds(4, False) == (1.5 / 4, 0.4) and speeds(4, True) == (0.6 / 4, 0.4)
    assert speeds(0, True) == (0.5, 1.0)  # nobody slows the round


def test_a_handoff_overlaps_with_the_compute_but_its_last_interval():
    timeline = Timeline()
    fast, slow = (Network(timeline, 1, 1, rate) for rate in (1000.0, 10.0))
    part = Part(0, 0, bytes=100, began=0.0, ended=1.0, intervals=10)
    assert fast.send(part) == pytest.approx(1.0 + 0.01)  # all but a tenth had gone
    assert slow.send(part) == pytest.approx(0.1 + 10.0)  # the wire is what takes time
    whole = Network(timeline, 1, 1, 1000.0)
    assert whole.send(Part(0, 0, bytes=100, began=0.0, ended=1.0, intervals=1)) == pytest.approx(1.1)


def test_a_replica_receives_one_thing_at_a_time_and_hops_keep_their_order():
    network = Network(Timeline(), 2, 1, 10.0)
    ends = [network.send(Part(stage, 0, bytes=10, began=0.0, ended=0.0, intervals=1)) for stage in (0, 1)]
    assert ends == [1.0, 2.0]
    assert [network.hop(0, 3.0), network.hop(0, 0.5)] == [3.0, 3.5]
    assert network.received == [20] and network.sent == [10, 10]


@pytest.mark.parametrize(("spec", "low", "high"), [("fixed:7", 7, 7), ("uniform:3:9", 3, 9), ("lognormal:50:1:80", 1, 80)])
def test_lengths_follow_their_distribution(spec: str, low: int, high: int):
    draw, rng = workload.lengths(spec, "lengths"), Random(1)
    values = [draw(rng) for _ in range(300)]
    assert low <= min(values) and max(values) <= high
    assert spec == "fixed:7" or len(set(values)) > 3


@pytest.mark.parametrize("spec", ["fixed", "fixed:0", "uniform:9:3", "lognormal:a:b", "normal:1:2", "fixed:1:2"])
def test_a_distribution_that_is_none_is_refused_by_flag_and_value(spec: str):
    with pytest.raises(ConfigError, match=f"--outputs {spec}: is no distribution of token counts; give fixed:N"):
        workload.lengths(spec, "outputs")


def test_equal_seeds_draw_equal_workloads_and_poisson_has_its_rate():
    first, again, other = (workload.draw(4000, "poisson", 20.0, "uniform:1:99", "fixed:3", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[-1].arrival_s == pytest.approx(4000 / 20, rel=0.05)
    assert [it.arrival_s for it in workload.draw(3, "uniform", 2.0, "fixed:1", "fixed:1", 0)] == [0.0, 0.5, 1.0]
    assert {it.arrival_s for it in workload.draw(3, "burst", 2.0, "fixed:1", "fixed:1", 0)} == {0.0}


def test_a_workload_file_is_read_in_order_of_arrival(tmp_path: Path):
    file = tmp_path / "w.jsonl"
    lines: list[dict[str, Any]] = [
        {"arrival_s": 2, "prompt_tokens": 5, "max_tokens": 6},
        {"arrival_s": 1.5, "prompt_tokens": 300, "output_tokens": 1, "prefix": "a", "prefix_tokens": 256},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert workload.read(file) == [workload.Asked(1.5, 300, 1, "a", 256), workload.Asked(2.0, 5, 6)]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "--workload .*: has no request"),
        ("{}", "--workload .*:1: KeyError.*; a line is an object with arrival_s, prompt_tokens and max_tokens"),
        ('{"prompt_tokens": 1, "max_tokens": 1}\n[]', "--workload .*:2: "),
        ('{"prompt_tokens": 0, "max_tokens": 1}', "lengths at least 1"),
    ],
)
def test_a_wrong_workload_is_refused_by_file_and_line(text: str, refusal: str, tmp_path: Path):
    (tmp_path / "w.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=refusal):
        workload.read(tmp_path / "w.jsonl")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_every_constant_has_its_unit_and_its_source(path: Path):
    entries = constants.load(path).values
    assert entries and all(entry["source"] and entry["unit"] for entry in entries.values())


def test_a_constant_that_is_missing_or_wrong_is_named(tmp_path: Path):
    path = constants_file(tmp_path, client_s=-1.0, points=[[2, 1], [1, 1]])
    found = constants.load(path)
    with pytest.raises(ConfigError, match=r"--constants .*constants.json: client_s = -1.0 must be a number of at least 0"):
        found.number("client_s")
    with pytest.raises(ConfigError, match=r"points = .* its x must ascend"):
        found.points("points")
    with pytest.raises(ConfigError, match="hbm_bytes_per_s = None is missing"):
        found.number("hbm_bytes_per_s")
    path.write_text("{}")
    with pytest.raises(ConfigError, match=f"--constants {path}: cannot be read"):
        constants.load(path)


def test_curves_are_straight_between_points_and_proportional_behind_them():
    curve = ((0.0, 1.0), (10.0, 2.0), (20.0, 6.0))
    assert [interpolate(curve, x) for x in (-1, 0, 5, 10, 15, 20, 40)] == [1, 1, 1.5, 2, 4, 6, 12]


def test_percentiles_are_values_that_occurred():
    assert [percentile([1.0, 2.0, 3.0, 4.0], percent) for percent in (0, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]
    assert percentile([], 50) == 0
