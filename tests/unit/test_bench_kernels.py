"""What `k3mesh bench kernels` is to time, and what it says about it. The times themselves need a GPU."""

import pytest
import torch

from k3mesh.errors import ConfigError
from kernels.registry import CANDIDATES
from services.launch.bench import kernels
from services.launch.bench.kernel_cases import LINEAR
from services.launch.bench.kernel_report import layer_sums, markdown, table
from services.launch.bench.kernel_times import Ceilings
from services.launch.bench.kernels import Result, Time


def test_every_case_times_an_op_of_the_registry_and_no_two_have_one_name():
    cases = list(kernels.all_cases())
    assert {case.op for case in cases} <= {*CANDIDATES, LINEAR}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.bytes > 0 for case in cases)


def test_a_floor_is_the_larger_of_bytes_and_operations():
    ceilings = Ceilings(copy_gb_per_s=4000, matrix_tflop_per_s=800)
    assert ceilings.floor_us(4_000_000, 0) == pytest.approx(1)
    assert ceilings.floor_us(4_000_000, 1_600_000_000) == pytest.approx(2)


def time(op: str, time_us: float, backend: str = "fast", bar: float | None = None, graph: bool = True) -> Time:
    return Time(op, "8 rows", backend, time_us, 10.0, time_us / 10, bar, graph, 2, 1)


def test_a_report_says_which_bars_are_met_what_was_not_timed_and_what_a_layer_takes():
    times = [
        time("mla_decode", 15.0, bar=2.0),
        time("mla_decode", 900.0, "reference", bar=2.0, graph=False),
        time(LINEAR, 30.0),
        time("prepare_experts", 200.0),
    ]
    refused = {"router: 8 rows, fast": "no router here"}
    result = Result("NVIDIA H200", Ceilings(4000, 800), times, refused, {"torch": "2.11"}, ["--backends", "all"], "today")
    for text in ("\n".join(table(result)), markdown(result)):
        assert "bar 2: met" in text and "bar 2: missed, call by call" in text
        assert "router: 8 rows, fast: no router here" in text
    kda, mla = layer_sums(times)
    assert "ops 30 µs, projections 60 µs, routed experts 400 µs; ops over experts 0.07" in kda
    assert "ops 15 µs, projections 30 µs, routed experts 200 µs" in mla


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_is_missing():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        kernels.main(["--ops", "rms_norm"])


def test_an_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="--ops softmax: no such op; choose from rms_norm"):
        kernels.main(["--ops", "softmax"])
