"""The cache table at the size of K3, against the figures of the cache specification."""

from services.contracts.geometry import PAGED, SLOT, Geometry, blocks_for
from services.contracts.topology import Topology
from tests.lib.k3 import MLA_LAYERS, k3_model

MODEL = k3_model()
PARTITION = (24, 23, 23, 23)


def prefill(partition: tuple[int, ...] = PARTITION, draft_layers: int = 0) -> Geometry:
    return Geometry(MODEL, Topology("prefill", 4, 1, 8, 8, 93, partition), "bfloat16", draft_layers)


def decode(draft_layers: int = 0) -> Geometry:
    return Geometry(MODEL, Topology("decode", 1, 4, 8, 32, 93, (93,)), "bfloat16", draft_layers)


def counts(geometry: Geometry, stage: int) -> tuple[int, int, int]:
    """(MLA, KDA, draft) layers of a stage."""
    fields = geometry.fields_of_stage(stage)
    return tuple(sum(f.arena == arena for f in fields) for arena in ("mla", "kda_rec", "draft"))  # pyright: ignore


def test_units_have_the_shapes_and_bytes_of_the_specification():
    fields = {field.field_id: field for field in decode(draft_layers=5).fields_of_stage(0)}
    mla, rec, conv, draft = (fields[name] for name in ("t.92.mla", "t.0.kda_rec", "t.0.kda_conv", "d.93.mla"))
    assert (mla.kind, mla.shape, mla.unit_bytes) == (PAGED, (128, 1, 576), 147_456)
    assert (rec.kind, rec.dtype, rec.shape, rec.unit_bytes) == (SLOT, "float32", (12, 128, 128), 786_432)
    assert (conv.kind, conv.shape, conv.parts, conv.unit_bytes) == (SLOT, (4608, 3), (1536, 1536, 1536), 27_648)
    assert (draft.shape, draft.arena) == ((128, 1, 576), "draft")


def test_stages_own_the_layers_of_the_automatic_and_of_the_aligned_partition():
    automatic, aligned = prefill(draft_layers=5), prefill((24, 24, 24, 21), draft_layers=5)
    assert [counts(automatic, stage) for stage in range(4)] == [(6, 18, 0), (5, 18, 0), (6, 17, 0), (7, 16, 5)]
    assert [counts(aligned, stage) for stage in range(4)] == [(6, 18, 0), (6, 18, 0), (6, 18, 0), (6, 15, 5)]


def test_the_stages_together_own_what_decode_holds_and_nothing_twice():
    geometry = prefill(draft_layers=5)
    stages = [field for stage in range(4) for field in geometry.fields_of_stage(stage)]
    assert sorted(stages, key=lambda f: f.field_id) == sorted(decode(5).fields_of_stage(0), key=lambda f: f.field_id)
    assert len({field.field_id for field in stages}) == len(stages) == 24 + 2 * 69 + 5


def test_a_producer_step_is_a_layer_and_the_drafter_comes_last():
    geometry = prefill(draft_layers=5)
    for stage, layers in enumerate(PARTITION):
        steps = geometry.producer_steps(stage)
        assert len(steps) == layers + (stage == 3)
        assert [field for step in steps for field in step] == list(geometry.fields_of_stage(stage))
    assert [field.field_id for field in geometry.producer_steps(3)[-1]] == [f"d.{n}.mla" for n in range(93, 98)]


def test_decode_bytes_are_those_of_the_capacity_formula():
    assert decode(draft_layers=5).block_bytes == 33_408 * 128
    assert decode().slot_bytes == 56_171_520
    assert prefill().block_bytes == 7 * 147_456 and prefill().slot_bytes == 18 * 814_080


def test_float32_caches_double_rows_and_history_but_not_recurrent_state():
    wide = {field.field_id: field for field in Geometry(MODEL, decode().topology, "float32").fields_of_stage(0)}
    assert wide["t.3.mla"].unit_bytes == 2 * 147_456 and wide["t.0.kda_conv"].unit_bytes == 2 * 27_648
    assert wide["t.0.kda_rec"].unit_bytes == 786_432


def test_layers_of_k3_are_mla_every_fourth_and_the_last():
    assert [layer for layer in range(93) if MODEL.is_mla(layer)] == list(MLA_LAYERS) and len(MLA_LAYERS) == 24


def test_a_started_block_is_a_whole_block():
    assert [blocks_for(tokens) for tokens in (0, 1, 127, 128, 129, 8192)] == [0, 1, 1, 1, 2, 64]
