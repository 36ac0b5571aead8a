"""The worker's wire: every field of the contract reaches the dataclass of its name, and back."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import count
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from k3mesh.errors import Internal
from k3mesh.v1 import worker_pb2
from services.worker import wire
from services.worker.speculative.sampling import Sampling

NOT_FOR_WORKERS = {"max_tokens", "ignore_eos", "stop_token_ids"}  # when to stop is the scheduler's business


def fill(message: Message, numbers: Iterable[int]) -> Message:
    """Give every field of a message, and of those inside it, a value of its own."""
    values = iter(numbers)
    for field in message.DESCRIPTOR.fields:
        value = next(values)
        if field.message_type and field.is_repeated:
            for _ in range(2):
                fill(getattr(message, field.name).add(), values)
        elif field.message_type:
            fill(getattr(message, field.name), values)
        elif field.is_repeated:
            getattr(message, field.name).extend([value, value + 1000])
        elif field.enum_type:
            setattr(message, field.name, field.enum_type.values[-1].number)
        else:
            setattr(message, field.name, _scalar(field, value))
    return message


def _scalar(field: FieldDescriptor, value: int) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"%d" % value
    return f"text {value}" if field.type == FieldDescriptor.TYPE_STRING else value


def assert_same(message: Message, it: Any) -> None:
    """Every field of the message equals the dataclass's field of that name; repeated ones are tuples."""
    assert is_dataclass(it)
    for field in message.DESCRIPTOR.fields:
        if field.name in NOT_FOR_WORKERS:
            continue
        found, wanted = getattr(it, field.name), getattr(message, field.name)
        if field.is_repeated:
            assert isinstance(found, tuple) and len(found) == len(wanted) > 0, field.full_name
            for one, other in zip(found, wanted, strict=True):
                assert_same(other, one) if field.message_type else _equal(one, other, field)
        elif field.message_type:
            assert_same(wanted, found)
        else:
            _equal(found, wanted, field)


def _equal(found: Any, wanted: Any, field: FieldDescriptor) -> None:
    assert wanted, f"{field.full_name} was not filled"
    assert (found.value if isinstance(found, Enum) else found) == wanted, field.full_name


@pytest.mark.parametrize("kind", ["prefill", "round", "forget"])
def test_every_field_of_a_command_is_read(kind: str):
    message = worker_pb2.WorkerCommand()
    fill(getattr(message, kind), count(1))
    assert_same(getattr(message, kind), wire.command(message))


def test_a_chunk_without_sampling_has_none():
    message = worker_pb2.WorkerCommand(prefill={"step_id": 1, "rows": [{"room": 3}]})
    step = wire.command(message)
    assert isinstance(step, wire.PrefillStep)
    assert step.rows[0].sampling is None


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.WorkerCommand(fence=1),
        worker_pb2.WorkerCommand(introduce={"scheduler": "x"}),
        worker_pb2.WorkerCommand(round={"round_id": 1}),
        worker_pb2.WorkerCommand(round={"round_id": 1, "mode": 9}),
    ],
    ids=["empty", "a second introduction", "no mode", "a mode of a newer version"],
)
def test_a_command_that_a_worker_does_not_know_is_refused(message: worker_pb2.WorkerCommand):
    with pytest.raises(Internal):
        wire.command(message)


REPORTS = [
    ("step", wire.StepDone(3, 2, 10.5, 11.5, (wire.FirstToken(7, 8, (8,)), wire.FirstToken(9, 10, (10,))))),
]


@pytest.mark.parametrize(("kind", "report"), REPORTS)
def test_every_field_of_a_report_is_written(kind: str, report: wire.Report):
    assert_same(getattr(wire.report(report), kind), report)


def test_a_rounds_result_is_written_in_columns():
    rows = (wire.PlaceTokens(5, (6, 7), (7, 1, 2)), wire.PlaceTokens(8, (9,), (9, 3, 4)))
    assert wire.report(wire.RoundResult(4, 1, rows, 1.5, 2.5, (9, 10))).round == worker_pb2.RoundResult(
        round_id=4, replica=1, started=1.5, ended=2.5, copied=[9, 10],
        places=[5, 8], counts=[2, 1], tokens=[6, 7, 9], proposals=[1, 2, 3, 4],
    )  # fmt: skip


def test_every_field_of_the_hello_is_written():
    it = wire.WorkerHello("p", 5, 1, 100, 9, "abc", "k3", 512, (1, 2), 4096, "def", 30, 14)
    assert_same(wire.hello(it), it)


def test_seeds_of_64_bits_survive():
    sampling = Sampling(temperature=0.5, top_p=0.25, top_k=3, seed=2**64 - 1)
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    message = worker_pb2.WorkerCommand(
        round={"round_id": 1, "mode": worker_pb2.ROUND_MODE_LOW_LATENCY_EAGER, "installs": [{"sampling": values}]}
    )
    plan = wire.command(message)
    assert isinstance(plan, wire.RoundPlan)
    assert plan.installs[0].sampling == replace(sampling)
