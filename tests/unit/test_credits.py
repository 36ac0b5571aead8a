"""Staging frames as credits, and the queues that wait for them."""

from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer.credits import FairQueue, Ring


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=200), st.integers(1, 6), st.integers(1, 4))
def test_no_frame_is_given_twice_and_no_owner_gets_more_than_its_window(
    moves: list[tuple[bool, int]], frames: int, window: int
):
    ring: Ring[int] = Ring(frames, window)
    held: list[tuple[int, int]] = []
    for take, owner in moves:
        if take and ring.can_take(owner):
            frame = ring.take(owner)
            assert frame not in [f for f, _ in held]
            held.append((frame, owner))
        elif held:
            ring.give_back(held.pop(owner % len(held))[0])
        ring.check()
        assert ring.used == len(held)
        for it in range(4):
            mine = sum(o == it for _, o in held)
            assert mine <= window and ring.can_take(it) == (len(held) < frames and mine < window)


@given(st.lists(st.integers(0, 3), max_size=60), st.sets(st.integers(0, 3)))
def test_keys_take_turns_and_each_key_s_items_come_in_order(keys: list[int], blocked: set[int]):
    queue: FairQueue[int, int] = FairQueue()
    for number, key in enumerate(keys):
        queue.push(key, number)
    taken: list[tuple[int, int]] = []
    while (turn := queue.turn(lambda key: key not in blocked)) is not None:
        taken.append(turn)
    for key in set(keys):
        wanted = [] if key in blocked else [number for number, k in enumerate(keys) if k == key]
        assert [number for k, number in taken if k == key] == wanted
    served: dict[int, int] = dict.fromkeys(set(keys) - blocked, 0)
    for at, (key, _) in enumerate(taken):
        waiting = {k for k, _ in taken[at:]}
        assert served[key] == min(served[k] for k in waiting), "a key went twice while another waited"
        served[key] += 1
    assert len(queue) == sum(key in blocked for key in keys)


def test_dropped_items_are_gone():
    queue: FairQueue[str, int] = FairQueue()
    for number in range(4):
        queue.push("a", number)
    queue.push("b", 9)
    queue.drop(lambda number: number in (1, 9))
    turns = [queue.turn(lambda _: True) for _ in range(4)]
    assert turns == [("a", 0), ("a", 2), ("a", 3), None]
