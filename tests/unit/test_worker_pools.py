"""The rank's pools: views lie where the placement record says, in memory that another process may map."""

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from services.contracts.geometry import Geometry
from services.contracts.placement import FieldPlace, Placement, place
from services.worker.cache.pools import DTYPES, Pools, allocate
from tests.lib.golden import TINY, golden_model, needs_golden, topology_of

pytestmark = needs_golden
BLOCKS, SLOTS = 5, 3


@pytest.fixture(params=[0, 1])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """One rank of stage 0 or 1 of a PP2 TP2 engine."""
    topology = topology_of(golden_model(TINY), stages=2, tp=2)
    rank = topology.place_of(request.param * 2)
    record = place(
        Geometry(golden_model(TINY), topology, "bfloat16"), rank, engine_id="p", engine_epoch=1, model_fingerprint="m",
        num_blocks=BLOCKS, num_slots=SLOTS, verify_width=1,
    )  # fmt: skip
    pools = allocate(record)
    yield pools
    pools.close()


def view_of(pools: Pools, field: FieldPlace) -> torch.Tensor:
    return getattr(pools.caches, field.field_id.split(".")[2])[field.layer]


def test_views_cover_the_stage_and_start_at_zero(pools: Pools):
    record: Placement = pools.placement
    assert sum(map(len, (pools.caches.mla, pools.caches.kda_rec, pools.caches.kda_conv))) == len(record.fields)
    for field in record.fields:
        view = view_of(pools, field)
        assert view.shape == (record.units(field), *field.shape)
        assert view.dtype == DTYPES[field.dtype]
        assert not view.any()


def test_a_unit_lies_at_the_address_that_the_record_names(pools: Pools):
    maps = [mmap.mmap(os.dup(fd), 0) for fd in pools.fds]
    for number, field in enumerate(pools.placement.fields):
        for unit in range(pools.placement.units(field)):
            value = torch.full(field.shape, 1 + number * 8 + unit, dtype=DTYPES[field.dtype])
            view_of(pools, field)[unit] = value
            start = field.offset + unit * field.unit_stride
            there = maps[field.arena_id][start : start + field.payload]
            assert there == value.view(torch.uint8).numpy().tobytes(), f"{field.field_id} unit {unit}"
    for number, field in enumerate(pools.placement.fields):  # and no unit lies over another
        for unit in range(pools.placement.units(field)):
            assert (view_of(pools, field)[unit] == 1 + number * 8 + unit).all()


def test_an_arena_cannot_be_resized_under_a_process_that_maps_it(pools: Pools):
    for fd in pools.fds:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
