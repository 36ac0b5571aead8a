"""How a batch is filled: budget, alignment, places, and the share of short prompts."""

import pytest

from services.scheduler.prefill.chunking import Budget


def test_a_chunk_ends_at_the_prompts_end_or_at_a_multiple_of_128():
    budget = Budget.of_batch(1000, 4, short_demand=0)
    assert budget.chunk_end(0, 999) == 999
    assert budget.chunk_end(0, 5000) == 896
    assert budget.chunk_end(896, 1000) == 1000
    assert budget.chunk_end(256, 5000) == 1152


def test_a_remainder_below_128_starts_no_chunk_that_does_not_end_a_prompt():
    budget = Budget(tokens=100, sequences=1, long_tokens=100)
    assert budget.chunk_end(0, 101) == 0
    assert budget.chunk_end(128, 229) == 128
    assert budget.chunk_end(128, 228) == 228


def test_a_batch_without_places_takes_no_chunk():
    budget = Budget.of_batch(1024, 1, short_demand=0)
    budget.take(10, 10)
    assert budget.spent and budget.chunk_end(0, 1) == 0


@pytest.mark.parametrize(
    ("budget", "demand", "long"), [(8192, 0, 8192), (8192, 1000, 7192), (8192, 9000, 4096), (128, 500, 128), (384, 500, 128)]
)
def test_long_prompts_leave_waiting_short_ones_up_to_half_of_the_batch(budget, demand, long):
    assert Budget.of_batch(budget, 32, demand).long_tokens == long


def test_short_prompts_are_not_bound_by_the_share_of_long_ones():
    budget = Budget.of_batch(8192, 32, short_demand=8000)
    assert budget.chunk_end(0, 100_000) == 4096
    budget.take(4096, 100_000)
    assert budget.chunk_end(0, 100_000) == 0
    assert budget.chunk_end(0, 2047) == 2047
