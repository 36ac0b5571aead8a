"""What holds between any two events, on the prefill engine."""

from collections import Counter
from typing import TYPE_CHECKING

from services.scheduler.prefill.request import NO_ROOM, Phase, Prefilling, Releasing, by_arrival
from services.scheduler.prefill.roster import Roster

if TYPE_CHECKING:
    from services.scheduler.prefill.planner import PrefillPlanner


def check(planner: "PrefillPlanner") -> None:
    """Raises AssertionError naming what is wrong."""
    _pool(planner.roster)
    _requests(planner.roster)
    _steps(planner)


def _pool(roster: Roster) -> None:
    pool = roster.pool
    pool.cache.check()
    holdings = [holding for request in roster.requests.values() if (holding := request.holding) is not None]
    own = [block for holding in holdings for block in holding.own_blocks]
    assert len(set(own)) == len(own) == pool.blocks.used - pool.cache.cached_blocks, "a block is one request's, or the cache's"
    held = Counter(entry for holding in holdings for entry in holding.cached)
    assert all(entry.holders == count for entry, count in held.items()), "an entry's holders are not who they should be"
    assert len(own) + len(held) == pool.cache.blocks_in_use, "an entry is held by nobody who is here"
    slots = [slot for holding in holdings for slot in (holding.slot, *holding.saving)]
    assert len(set(slots)) == len(slots) == pool.cache.slots_in_use, "a slot is one request's, or a checkpoint"
    assert pool.promised == sum(holding.promised for holding in holdings)
    assert pool.promised <= pool.cache.blocks_available, "a started prompt may have to wait for blocks"


def _requests(roster: Roster) -> None:
    requests = roster.requests.values()
    assert {room: request.request_id for room, request in roster.rooms.items()} == {
        request.room: request.request_id for request in requests if request.room != NO_ROOM
    }, "a room is known if and only if its request is here"
    assert +roster.phases == Counter(request.phase for request in requests)
    for phase, line in ((Phase.QUEUED, roster.queue), (Phase.READY, roster.ready)):
        assert line == sorted((r for r in requests if r.phase is phase), key=by_arrival), f"{phase} is out of order"
    going = {r.request_id for r in requests if isinstance(r.state, Prefilling) and r.state.next < r.prompt_tokens}
    assert {r.request_id for r in roster.incomplete} == going
    assert roster.phases[Phase.RESERVING] <= 1
    assert roster.phases[Phase.BOOTSTRAPPING] + roster.phases[Phase.READY] <= roster.limits.reserved_ahead
    assert all((request.room == NO_ROOM) == (request.phase is Phase.QUEUED) for request in requests)


def _steps(planner: "PrefillPlanner") -> None:
    steps = planner.pipeline.steps.values()
    assert len(steps) <= planner.limits.stages + 1
    rows = Counter(row.room for step in steps for row in step.rows)
    holders = {
        r.room: r.state.in_flight for r in planner.roster.requests.values() if isinstance(r.state, Prefilling | Releasing)
    }
    assert rows == Counter({room: count for room, count in holders.items() if count}), "a launched row has no holder"
