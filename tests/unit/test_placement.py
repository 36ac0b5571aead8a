"""Placement records, the pair check, manifests and the chunk rule."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3mesh.errors import ConfigError, TransferFailed
from services.contracts.geometry import Geometry, blocks_for
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.placement import Placement, chunk_positions, pair_check, place
from services.contracts.topology import Topology, even_partition
from tests.lib.k3 import k3_model
from tests.lib.transfer import manifest, record

P = [record("prefill", stage) for stage in range(2)]
D = record("decode")


def with_field(place: Placement, number: int, **changes: Any) -> Placement:
    fields = list(place.fields)
    fields[number] = replace(fields[number], **changes)
    return replace(place, fields=tuple(fields))


def test_the_full_size_record_has_the_spec_s_units_and_bytes():
    topology = Topology("prefill", 4, 1, 8, 8, 93, even_partition(93, 4))
    geometry = Geometry(k3_model(), topology, "bfloat16", draft_layers=5)
    last = place(
        geometry, topology.place_of(31), engine_id="p", engine_epoch=1, model_fingerprint="m", num_blocks=100, num_slots=9,
        verify_width=8, speculative_algorithm="DSPARK",
    )  # fmt: skip
    last.check()
    sizes = {field.field_id.split(".")[0] + "." + field.field_id.split(".")[2]: field.payload for field in last.fields}
    assert sizes == {"t.mla": 147_456, "d.mla": 147_456, "t.kda_rec": 786_432, "t.kda_conv": 27_648}
    assert [arena.name for arena in last.arenas] == ["mla", "kda_rec", "kda_conv", "draft"]
    # §12: 12 paged layers of the last stage and its 16 KDA layers, for 8,192 tokens
    assert last.expected_bytes(64) == 64 * 12 * 147_456 + 16 * 814_080
    assert len(last.fingerprint) == 64


@pytest.mark.parametrize("draft_layers", [0, 2])
def test_producer_steps_are_the_geometry_s(draft_layers: int):
    topology = Topology("prefill", 2, 1, 1, 1, 93, even_partition(93, 2))
    geometry = Geometry(k3_model(), topology, "float32", draft_layers)
    for stage in range(2):
        made = place(
            geometry, topology.place_of(stage), engine_id="p", engine_epoch=1, model_fingerprint="m", num_blocks=2, num_slots=2,
            verify_width=1,
        )  # fmt: skip
        steps = [sorted(made.fields[index].field_id for index in step) for step in made.producer_steps]
        assert steps == [sorted(field.field_id for field in step) for step in geometry.producer_steps(stage)]


def test_a_fingerprint_leaves_out_rank_and_life_and_nothing_else():
    base = P[0]
    for change in (dict(engine_epoch=99), dict(stage=1), dict(tp_rank=3), dict(dp_rank=2), dict(global_rank=7)):
        assert replace(base, **change).fingerprint == base.fingerprint
    for change in (dict(model_fingerprint="x"), dict(num_blocks=25), dict(verify_width=8), dict(layer_hi=4)):
        assert replace(base, **change).fingerprint != base.fingerprint
    assert with_field(base, 0, unit_stride=base.fields[0].unit_stride + 64).fingerprint != base.fingerprint


def test_an_equal_pair_passes_with_different_sizes_and_strides():
    pair_check(P, replace(record("decode", num_blocks=9), num_blocks=8))


@pytest.mark.parametrize(
    ("stages", "d", "named"),
    [
        (P, replace(D, model_fingerprint="other"), ["model_fingerprint", "'m'", "'other'"]),
        (P, replace(D, draft_fingerprint="other"), ["draft_fingerprint", "''", "'other'"]),
        (P, replace(D, verify_width=8), ["verify_width", "1", "8"]),
        (P, replace(D, tp_size=2), ["tp_size", "1", "2"]),
        (P, replace(D, tp_rank=1), ["tp_rank", "0", "1"]),
        (P, replace(D, speculative_algorithm="MTP"), ["speculative_algorithm", "NONE", "MTP"]),
        (P, with_field(D, 1, dtype="bfloat16"), ["t.0.kda_conv.dtype", "float32", "bfloat16"]),
        (P, with_field(D, 0, shape=(1, 2, 3)), ["t.0.kda_rec.shape", "(2, 32, 32)", "(1, 2, 3)"]),
        (P, with_field(D, 1, parts=()), ["t.0.kda_conv.parts", "(64, 64, 64)", "()"]),
        (P, with_field(D, 0, payload=4096), ["t.0.kda_rec.payload", "8192", "4096"]),
        (P[:1], D, ["stage 0 of 2", "1 agents"]),
        (P[::-1], D, ["stage 1 of 2", "place 0"]),
        ([P[0], replace(P[1], engine_epoch=5)], D, ["epoch"]),
        ([P[0], replace(P[1], num_blocks=23)], D, ["num_blocks", "23", "24"]),
        ([P[0], replace(P[1], fields=P[1].fields[1:])], D, ["t.3.kda_rec", "no owner"]),
        ([P[0], replace(P[1], fields=(*P[1].fields, P[0].fields[0]))], D, ["t.0.kda_rec", "two owners"]),
        (P, replace(D, fields=D.fields[1:]), ["t.0.kda_rec", "not in the cache"]),
        ([D], D, ["role", "decode", "prefill"]),
        ([replace(P[0], contract="fp/2"), P[1]], D, ["fp/2", "fp/1"]),
        (P, replace(D, contract="fp/2"), ["fp/2", "fp/1"]),
        (P, replace(D, block_tokens=64), ["block_tokens 64", "128"]),
        ([P[0], replace(P[1], num_slots=5)], D, ["num_slots", "5", "6"]),
        ([P[0], replace(P[1], engine_id="prefill-9")], D, ["prefill-9", "one engine epoch"]),
        (P, with_field(D, 0, kind="paged"), ["t.0.kda_rec.kind", "slot", "paged"]),
        (P, with_field(D, 0, layer=9), ["t.0.kda_rec.layer", "0", "9"]),
        (P, replace(D, fields=(*D.fields, D.fields[0])), ["listed twice"]),
        (P, with_field(D, 0, offset=32), ["aligned"]),
        (P, with_field(D, 0, offset=D.arenas[1].length), ["behind"]),
        (P, with_field(D, 0, unit_stride=4096), ["stride"]),
        (P, with_field(D, 0, arena_id=9), ["arena 9"]),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_naming_field_and_values(stages: list[Placement], d: Placement, named: list[str]):
    with pytest.raises(ConfigError) as refused:
        pair_check(stages, d)
    assert refused.value.detail == "PD_CONTRACT"
    assert not [word for word in named if word not in refused.value.message], refused.value.message


def test_every_mismatch_of_a_pair_is_named_at_once():
    """One restart must be enough to put them right."""
    wrong = with_field(replace(D, model_fingerprint="other", tp_size=2, fields=D.fields[:-1]), 1, dtype="bfloat16")
    stages = [P[0], replace(P[1], fields=(*P[1].fields, P[0].fields[0]))]
    with pytest.raises(ConfigError) as refused:
        pair_check(stages, wrong)
    named = ["model_fingerprint is 'm' on prefill-0 rank 0 and 'other'", "tp_size is 1", "t.0.kda_conv.dtype is 'float32'"]
    named += ["t.0.kda_rec has two owners, prefill-0 rank 0 and prefill-0 rank 1", "t.5.mla of prefill-0 rank 1 is not in"]
    assert not [text for text in named if text not in refused.value.message], refused.value.message


def test_a_fault_of_every_field_is_told_briefly():
    with pytest.raises(ConfigError, match=r"; and 176 more\. Start") as refused:
        pair_check(*full_size(even_partition(93, 4), dtype="float32"))
    assert len(refused.value.message) < 4096


def full_size(partition: tuple[int, ...], dtype: str = "bfloat16", draft_layers: int = 5) -> tuple[list[Placement], Placement]:
    """The records of tensor-parallel rank 0 at the size of K3, with conv history and MLA rows of `dtype` on D."""
    common: dict[str, Any] = dict(engine_epoch=1, model_fingerprint="m", num_slots=9, verify_width=8)
    prefill = Topology("prefill", len(partition), 1, 8, 8, 93, partition)
    decode = Topology("decode", 1, 4, 8, 32, 93, (93,))
    stages = [
        place(
            Geometry(k3_model(), prefill, "bfloat16", draft_layers), prefill.place_of(prefill.rank_of(stage, 0, 0)),
            engine_id="p", num_blocks=100, **common,
        )
        for stage in range(len(partition))
    ]  # fmt: skip
    d = place(Geometry(k3_model(), decode, dtype, draft_layers), decode.place_of(0), engine_id="d", num_blocks=70, **common)
    return stages, d


@given(st.sets(st.integers(1, 92), max_size=7), st.sampled_from([0, 1, 5]))
@example({24, 48, 72}, 5)
@example({24, 47, 70}, 1)
def test_any_partition_makes_a_pair_in_which_every_field_has_one_owner_and_one_barrier(cuts: set[int], draft_layers: int):
    """One ownership table for barriers, sender and receiver, whatever the partition."""
    edges = [0, *sorted(cuts), 93]
    partition = tuple(hi - lo for lo, hi in pairwise(edges))
    stages, d = full_size(partition, draft_layers=draft_layers)
    pair_check(stages, d)
    written = [stage.fields[index].field_id for stage in stages for step in stage.producer_steps for index in step]
    assert sorted(written) == sorted(field.field_id for field in d.fields)
    assert sum(stage.expected_bytes(64) for stage in stages) == d.expected_bytes(64)
    layers = [stage.layer_hi - stage.layer_lo for stage in stages]
    assert [len(stage.producer_steps) for stage in stages] == [*layers[:-1], layers[-1] + (draft_layers > 0)]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (dict(decode_epoch=1), "PD_STALE"),
        (dict(prefix=300 // 128 * 128 + 128), "PD_MANIFEST"),
        (dict(prefix_tokens=1), "PD_MANIFEST"),
        (dict(blocks=(1, 2)), "PD_MANIFEST"),
        (dict(block_gens=(1,)), "PD_MANIFEST"),
        (dict(blocks=(1, 1, 2)), "PD_MANIFEST"),
        (dict(blocks=(0, 1, 2)), "PD_MANIFEST"),
        (dict(blocks=(1, 2, 24)), "PD_MANIFEST"),
        (dict(slot=0), "PD_MANIFEST"),
        (dict(slot=6), "PD_MANIFEST"),
    ],
)
def test_a_manifest_against_the_rules_is_refused(changes: dict[str, Any], code: str):
    manifest().check(D)
    with pytest.raises(TransferFailed) as refused:
        manifest(**changes).check(D)
    assert refused.value.detail == code


@given(st.data(), st.integers(1, 20 * BLOCK_TOKENS))
def test_chunks_bring_every_position_once_and_none_that_is_not_full(data: Any, prompt: int):
    """Whatever P had cached, whatever D has, however the prompt is cut."""
    prefix = data.draw(st.integers(0, blocks_for(prompt) - 1)) * BLOCK_TOKENS
    cached = data.draw(st.integers(0, blocks_for(prompt) - 1)) * BLOCK_TOKENS
    wanted = manifest(1, prompt, prefix)
    cuts = data.draw(st.sets(st.integers(cached + 1, prompt), max_size=8)) | {prompt}
    seen: list[int] = []
    start = cached
    for end in sorted(cuts):
        positions = chunk_positions(wanted, start, end, start == cached, last=end == prompt)
        if end < prompt:
            assert all((wanted.first_block + position + 1) * BLOCK_TOKENS <= end for position in positions)
        seen += positions
        start = end
    assert seen == list(range(len(wanted.blocks)))
