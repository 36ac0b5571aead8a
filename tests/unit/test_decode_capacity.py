import pytest

from services.contracts.ids import BlockKey, Replica
from services.scheduler.decode.capacity import Load, Pool, choose, growth, max_request_tokens


def pool(replica: int = 0, places: int = 4, blocks: int = 21, slots: int = 5) -> Pool:
    return Pool(Replica(replica), places, blocks, slots)


def load(of: Pool, promised: int = 0, quarantined: int = 0) -> Load:
    return Load(of, promised, quarantined)


def test_a_holding_has_the_lowest_free_place_and_a_slot_and_blocks_that_nobody_else_has():
    one = pool()
    first, second = one.take(3), one.take(2)
    assert first is not None and second is not None
    assert (first.place, second.place) == (0, 1)
    assert first.slot != second.slot and not set(first.blocks) & set(second.blocks)
    one.check([first, second])
    one.give_back(first)
    again = one.take(1)
    assert again is not None and again.place == 0
    one.check([again, second])


@pytest.mark.parametrize(("places", "blocks", "slots"), [(1, 21, 5), (4, 3, 5), (4, 21, 2)])
def test_taking_is_all_or_nothing_whatever_runs_out(places: int, blocks: int, slots: int):
    one = pool(places=places, blocks=blocks, slots=slots)
    first = one.take(2)
    assert first is not None
    assert one.take(2) is None
    one.check([first])
    one.give_back(first)
    one.check([])
    assert (one.blocks.used, one.slots.used, one.places_used) == (0, 0, 0)


def test_what_is_given_back_twice_raises():
    one = pool()
    holding = one.take(1)
    assert holding is not None
    one.give_back(holding)
    with pytest.raises(ValueError, match="given back twice"):
        one.give_back(holding)
    one.check([])


def test_growing_adds_blocks_or_changes_nothing():
    one = pool(blocks=5)
    holding = one.take(2)
    assert holding is not None
    assert one.grow(holding, 2) and len(holding.blocks) == 2
    assert one.grow(holding, 4) and len(holding.blocks) == 4
    assert not one.grow(holding, 5) and len(holding.blocks) == 4
    one.check([holding])


@pytest.mark.parametrize(
    ("position", "remaining", "rows", "held", "blocks"),
    [
        (128, 1, 1, 1, 1),  # the round at row 128 writes into a second block
        (127, 1, 1, 1, 0),
        (127, 2, 1, 1, 1),
        (121, 1, 8, 1, 1),  # rows 121..128
        (120, 1, 8, 1, 0),
        (128, 5000, 1, 1, 4),  # no more than the next 512 tokens are asked for
        (128, 0, 1, 1, 0),
        (128, 1, 1, 9, 0),
    ],
)
def test_growth_is_what_the_next_tokens_write_beyond_what_is_held(position, remaining, rows, held, blocks):
    assert growth(position, remaining, rows, held) == blocks


def test_the_replica_with_fewest_requests_is_chosen_then_the_one_with_most_free_blocks_then_the_first():
    busy, small, large, twin = pool(0), pool(1, blocks=15), pool(2), pool(3)
    assert busy.take(1) is not None
    assert choose([load(busy), load(small), load(large), load(twin)], 1, 0) == 2
    assert choose([load(busy), load(small)], 1, 0) == 1
    assert choose([load(busy), load(small)], 18, 0) == 0, "where it fits"


def test_admission_leaves_what_others_may_still_ask_for():
    one = pool(blocks=11)
    assert choose([load(one, promised=4)], 2, 4) == 0
    assert choose([load(one, promised=5)], 2, 4) is None


def test_nobody_is_admitted_where_more_than_a_tenth_of_the_blocks_is_in_quarantine():
    one = pool(blocks=21)
    assert choose([load(one, quarantined=2)], 1, 0) == 0
    assert choose([load(one, quarantined=3)], 1, 0) is None
    assert choose([load(one, quarantined=3), load(pool(1))], 1, 0) == 1


@pytest.mark.parametrize(("missing", "changes"), [("places", {"places": 1}), ("slots", {"slots": 2})])
def test_nobody_is_admitted_without_a_place_and_a_slot(missing: str, changes: dict[str, int]):
    one = pool(**changes)
    assert one.take(1) is not None
    assert choose([load(one)], 1, 0) is None


def test_a_block_that_is_there_twice_is_given_up_when_its_other_reader_has_gone():
    one = pool()
    first, second = one.take(2), one.take(2)
    assert first is not None and second is not None
    for holding in (first, second):
        one.final(holding, BlockKey(b"same text"))
    free = one.cache.blocks_available
    assert not one.merge(second) and not one.merge(first)
    one.give_back(first)
    one.check([second])
    assert one.cache.blocks_available == free + 1  # the shared one stays, for its second reader's sake
    assert one.merge(second) and one.cache.blocks_available == free + 2
    one.check([second])
    one.give_back(second)
    one.check([])


def test_whatever_is_within_the_request_limit_fits_an_empty_replica_to_its_last_round():
    for blocks, rows in ((2, 1), (5, 1), (5, 15)):
        limit = max_request_tokens(blocks, max_model_len=100_000, rows=rows)
        last_round = limit - 2  # of prompt 1 and limit - 1 new tokens: the first is given, the last round starts there
        assert last_round + rows <= (blocks - 1) * 128 < last_round + rows + 2
    assert max_request_tokens(100, max_model_len=300, rows=1) == 300
