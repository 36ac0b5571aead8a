"""Three handoffs with wrong bytes within a minute make an engine unhealthy; a minute without one makes it well."""

from random import Random
from typing import Any

import pytest

import services.scheduler.prefill.events as prefill
from services.contracts.events import DeadlinePassed
from services.contracts.ids import GlobalRank, RequestId, Room
from services.contracts.messages import Failure, Sampling
from services.scheduler.alarm import Alarm
from services.scheduler.prefill.planner import PrefillPlanner
from tests.lib.prefill_world import limits

DAMAGE = Failure("transfer_failed", "the checksum is wrong", "PD_BYTES")


def heard(*times: float, failure: Failure | None = DAMAGE) -> Alarm:
    alarm = Alarm()
    for room, at in enumerate(times):
        alarm.hear(Room(room), failure, at)
    return alarm


@pytest.mark.parametrize(
    ("times", "now", "raised"),
    [
        ((0.0, 30.0), 30.0, False),
        ((0.0, 30.0, 59.0), 59.0, True),
        ((0.0, 30.0, 61.0), 61.0, False),
        ((0.0, 30.0, 61.0, 62.0), 62.0, True),
        ((0.0, 1.0, 2.0), 61.9, True),
        ((0.0, 1.0, 2.0), 62.0, False),
        ((0.0, 1.0, 2.0, 50.0), 109.0, True),
    ],
)
def test_three_within_a_minute_raise_it_and_a_minute_without_one_ends_it(times: tuple[float, ...], now: float, raised: bool):
    alarm = heard(*times)
    assert alarm.raised(now) is raised and bool(alarm.reason(now)) is raised
    assert alarm.next_change(now) == (times[-1] + 60.0 if raised else None)


def test_ranks_that_report_one_room_are_one_strike_and_other_failures_are_none():
    alarm = Alarm()
    for rank in range(8):
        alarm.hear(Room(1), DAMAGE, float(rank))
    assert not alarm.raised(8.0)
    assert not heard(1.0, 2.0, 3.0, failure=Failure("transfer_failed", "late", "PD_TIMEOUT_WAIT")).raised(3.0)
    assert not heard(1.0, 2.0, 3.0, failure=None).raised(3.0)


def test_an_unhealthy_prefill_engine_takes_no_new_requests_until_it_is_well():
    planner = PrefillPlanner(limits(), Random(0))
    planner.apply(prefill.DecodeConnected("decode-0", 1, 4096), 0.0)

    def ask(name: str, now: float) -> list[Any]:
        arrived = prefill.RequestArrived(RequestId(name), 10, Sampling(0.0, 1.0, 0, 0, 4, False, ()), 60.0)
        return planner.apply(arrived, now)

    for room in range(3):
        effects = planner.apply(prefill.RoomFailed(GlobalRank(0), Room(room), DAMAGE), 1.0 + room)
    assert [type(effect) for effect in effects] == [prefill.HealthChanged] and effects[0].reason
    refused = ask("a", 4.0)[0]
    assert isinstance(refused, prefill.PublishFailure) and refused.failure.detail == "PD_BYTES"
    assert "prefill-0 is unhealthy: at least 3 handoffs within 60 s" in refused.failure.message
    assert planner.next_deadline() == 63.0
    assert planner.apply(DeadlinePassed(), 63.0) == [prefill.HealthChanged("")]
    assert isinstance(ask("b", 64.0)[0], prefill.PublishQueued)
