"""The table of request states."""

from itertools import pairwise

import pytest

from services.contracts.lifecycle import OWNER, RANK, TERMINAL, TRANSITIONS, Owner, State, may_follow


def test_every_living_state_has_an_owner_and_a_way_on_and_the_end_has_none():
    living = set(State) - TERMINAL
    assert set(OWNER) == set(TRANSITIONS) == living
    assert not any(may_follow(end, after) for end in TERMINAL for after in State)


def test_every_state_can_be_reached_and_can_end():
    reached, ends = {State.RECEIVED}, set(TERMINAL)
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS.get(state, ())}
        ends |= {state for state, after in TRANSITIONS.items() if after & ends}
    assert reached == ends == set(State)


@pytest.mark.parametrize("state", [s for s in State if s not in TERMINAL])
def test_a_lost_engine_may_fail_any_living_request(state: State):
    assert may_follow(state, State.FAILED)


def test_the_normal_road_is_legal_and_its_versions_rise():
    road = [
        State.RECEIVED, State.QUEUED, State.RESERVED, State.BOOTSTRAPPING, State.PREFILLING, State.TRANSFERRING,
        State.INSTALLED, State.DECODING,
    ]  # fmt: skip
    for before, after in pairwise(road):
        assert may_follow(before, after) and RANK[before] < RANK[after]
    assert may_follow(State.DECODING, State.FINISHING) and may_follow(State.FINISHING, State.FINISHED)


def test_no_state_is_skipped_backwards_and_decode_never_gives_a_request_back():
    assert not may_follow(State.PREFILLING, State.RESERVED) and not may_follow(State.QUEUED, State.PREFILLING)
    handed_over = {State.INSTALLED, State.DECODING, State.RETRACTING, State.RETRACTED, State.RESTORING, State.FINISHING}
    for state in handed_over:
        assert OWNER[state] is Owner.DECODE
        assert not {OWNER.get(after) for after in TRANSITIONS[state]} - {Owner.DECODE, None}
