import pytest

from services.scheduler.decode.buckets import RoundMode, shape_of

LADDER = (1, 2, 4, 8, 16, 24, 31, 32)


@pytest.mark.parametrize(
    ("live", "bucket"), [([1], 1), ([0, 3], 4), ([32, 0, 0, 1], 32), ([25, 25], 31), ([9, 8], 16), ([24], 24)]
)
def test_the_smallest_captured_bucket_that_holds_the_largest_replica(live: list[int], bucket: int):
    assert shape_of(live, LADDER, graphs=True) == (bucket, RoundMode.LOW_LATENCY_GRAPH)


def test_no_round_when_all_replicas_idle():
    assert shape_of([0, 0, 0], LADDER, graphs=True) is None


def test_a_batch_beyond_the_ladder_makes_all_of_them_eager_at_its_own_size():
    assert shape_of([1, 40], LADDER, graphs=True) == (40, RoundMode.LOW_LATENCY_EAGER)


def test_eager_engines_still_pad_to_the_ladder():
    assert shape_of([3], LADDER, graphs=False) == (4, RoundMode.LOW_LATENCY_EAGER)
