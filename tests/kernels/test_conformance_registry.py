"""How a backend is chosen, and what is said about those that were not."""

import dataclasses

import pytest
import torch

from k3mesh.errors import ConfigError
from kernels.ops import OpGeometry, Ops
from kernels.registry import CANDIDATES, BackendUnusable, Candidate, bundle, format_table, resolve
from services.worker.model.backends import choose_ops
from tests.lib.conformance import geometry
from tests.lib.golden import TINY, golden_model, needs_golden, topology_of

CPU = torch.device("cpu")


def picky(device: torch.device, shape: OpGeometry) -> str | None:
    return None if shape.hidden == 7168 else f"hidden {shape.hidden} is not 7168"


TABLE = {"rms_norm": (Candidate("fast", lambda: lambda: "fast", picky), CANDIDATES["rms_norm"][-1])}


def test_auto_takes_the_first_candidate_that_supports_the_geometry():
    assert resolve("rms_norm", CPU, geometry(), candidates=TABLE).backend == "fast"


def test_auto_ends_at_the_reference_and_remembers_the_reason():
    choice = resolve("rms_norm", CPU, geometry(hidden=64), candidates=TABLE)
    assert (choice.backend, choice.refused) == ("reference", (("fast", "hidden 64 is not 7168"),))
    assert "reference" in format_table([choice]) and "fast: hidden 64 is not 7168" in format_table([choice])


def test_a_named_backend_that_cannot_serve_raises_its_reason():
    with pytest.raises(BackendUnusable, match="'fast' cannot serve rms_norm on cpu: hidden 64 is not 7168"):
        resolve("rms_norm", CPU, geometry(hidden=64), "fast", TABLE)


def test_an_unknown_backend_raises_with_the_known_ones():
    with pytest.raises(BackendUnusable, match="'quick' does not implement rms_norm; choose 'auto' or one of: fast, reference"):
        resolve("rms_norm", CPU, geometry(), "quick", TABLE)


def test_a_named_backend_is_taken_before_a_better_one():
    choice = resolve("rms_norm", CPU, geometry(), "reference", TABLE)
    assert (choice.backend, choice.refused) == ("reference", (("fast", "reference was asked for"),))


def test_the_table_and_the_bundle_name_the_same_ops_and_each_ends_at_the_reference():
    assert list(CANDIDATES) == [field.name for field in dataclasses.fields(Ops)]
    assert all(candidates[-1].backend == "reference" for candidates in CANDIDATES.values())
    ops = bundle([resolve(op, CPU, geometry(), "reference") for op in CANDIDATES])
    assert ops.rms_norm is CANDIDATES["rms_norm"][-1].implementation


def test_on_a_cpu_every_backend_but_the_reference_asks_for_a_gpu():
    for candidates in CANDIDATES.values():
        for candidate in candidates[:-1]:
            reason = candidate.supports(CPU, geometry(torch.bfloat16))
            assert reason is not None and "needs an NVIDIA GPU of compute capability" in reason, candidate.backend


@needs_golden
def test_a_backend_flag_that_is_unusable_here_is_a_configuration_error_that_names_the_flag():
    model = golden_model(TINY)
    with pytest.raises(ConfigError, match=r"--moe-backend nothing: .*choose 'auto'") as caught:
        choose_ops(model, topology_of(model), "cpu", torch.float32, torch.float32, moe_backend="nothing")
    assert caught.value.param == "moe_backend"


@needs_golden
def test_the_choices_cover_every_op():
    model = golden_model(TINY)
    _, choices = choose_ops(model, topology_of(model), "cpu", torch.float32, torch.float32, attention_backend="reference")
    assert [choice.op for choice in choices] == list(CANDIDATES)
    assert len(format_table(choices).splitlines()) == len(CANDIDATES)
