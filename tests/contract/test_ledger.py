"""The ledger against a real redis-server on a Unix socket."""

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from k3mesh.errors import ConfigError
from services.contracts.lifecycle import RANK, State
from services.runtime.ledger import Ledger
from tests.lib.redis_server import RedisServer


@pytest.fixture
async def client(journal: RedisServer):
    client = redis.asyncio.from_url(journal.url, decode_responses=True)
    yield client
    await client.aclose()


async def test_absent_redis_is_one_clear_error(tmp_path: Path):
    ledger = Ledger(f"unix://{tmp_path}/nothing.sock", "prefill-0")
    with pytest.raises(ConfigError, match=r"--redis-url .*nothing\.sock: Redis does not answer"):
        await ledger.connect()
    await ledger.close()


async def test_two_owners_in_any_order_leave_the_newest_state_and_the_whole_log(journal, client):
    p, d = Ledger(journal.url, "prefill-0"), Ledger(journal.url, "decode-0")
    await p.connect()
    await d.connect()
    p.transition("r1", State.QUEUED, 0, RANK[State.QUEUED], prompt_tokens=7)
    await p.close()
    d.transition("r1", State.INSTALLED, 0, RANK[State.INSTALLED])
    await d.close()
    late = Ledger(journal.url, "prefill-0")
    await late.connect()  # finds nothing of its own to fail: D owns r1
    late.transition("r1", State.TRANSFERRING, 0, RANK[State.TRANSFERRING], chunks="[]")
    await late.close()
    assert await client.hget("k3:req:r1", "state") == "INSTALLED"
    assert await client.hget("k3:req:r1", "owner") == "decode-0"
    entries = [(fields["state"], fields.get("late")) for _, fields in await client.xrange("k3:req:r1:log")]
    assert entries == [("QUEUED", None), ("INSTALLED", None), ("TRANSFERRING", "1")]
    assert await client.smembers("k3:live:decode-0") == {"r1"}
    assert await client.smembers("k3:live:prefill-0") == set()


async def test_an_ended_request_stays_ended_and_is_kept_for_an_hour(journal, client):
    ledger = Ledger(journal.url, "decode-0")
    await ledger.connect()
    ledger.transition("r1", State.FINISHED, 0, 9, reason="stop")
    ledger.transition("r1", State.DECODING, 0, 99)
    await ledger.close()
    assert await client.hget("k3:req:r1", "state") == "FINISHED"
    assert 3500 < await client.ttl("k3:req:r1") <= 3600
    assert 3500 < await client.ttl("k3:req:r1:log") <= 3600
    assert await client.smembers("k3:live:decode-0") == set()


async def test_what_a_dead_owner_left_open_is_failed_at_its_restart(journal, client):
    first = Ledger(journal.url, "decode-0")
    await first.connect()
    first.transition("r1", State.DECODING, 0, 7)
    await first.close()
    second = Ledger(journal.url, "decode-0")
    await second.connect()
    await second.close()
    assert await client.hgetall("k3:req:r1") | {"at": ""} == {
        "state": "FAILED", "ver": "1000000000000", "owner": "decode-0", "ended": "1", "at": "", "error": "engine_lost",
        "message": "decode-0 restarted and holds nothing of this request",
    }  # fmt: skip


async def test_a_request_given_to_an_engine_that_died_before_it_wrote_is_failed_at_that_engines_restart(journal, client):
    p = Ledger(journal.url, "prefill-0")
    await p.connect()
    p.transition("r1", State.TRANSFERRING, 0, 5)
    p.transition("r1", State.TRANSFERRING, 0, 6, "decode-0", bytes_sent=7)
    await p.close()
    assert await client.smembers("k3:live:decode-0") == {"r1"} and not await client.smembers("k3:live:prefill-0")
    d = Ledger(journal.url, "decode-0")
    await d.connect()
    await d.close()
    assert await client.hget("k3:req:r1", "state") == "FAILED" and not await client.smembers("k3:live:decode-0")


async def test_an_outage_of_redis_delays_transitions_and_loses_none(journal, client):
    ledger = Ledger(journal.url, "decode-0")
    await ledger.connect()
    ledger.transition("r1", State.INSTALLED, 0, 6)
    journal.stop()
    ledger.transition("r1", State.DECODING, 0, 7)
    await asyncio.sleep(0.3)
    journal.start()
    await ledger.close(grace=5)
    assert await client.hget("k3:req:r1", "state") == "DECODING"
    assert [f["state"] for _, f in await client.xrange("k3:req:r1:log")][-1] == "DECODING"


async def test_a_second_scheduler_of_a_role_is_refused_while_the_first_renews(journal):
    first, second = Ledger(journal.url, "prefill-0", lease_ms=600), Ledger(journal.url, "prefill-1", lease_ms=600)
    await first.connect()
    await second.connect()
    fence = await first.lease("ps")
    first.keep(lambda: {"role": "prefill"})
    with pytest.raises(ConfigError, match="another ps scheduler is active"):
        await second.lease("ps")
    await first.close()
    assert await second.lease("ps") == fence + 1
    await second.close()


async def test_a_person_cancels_a_request_by_redis_cli(journal, client):
    ledger = Ledger(journal.url, "prefill-0")
    await ledger.connect()
    cancels = ledger.cancels()
    waiting = asyncio.ensure_future(anext(cancels))
    async with asyncio.timeout(10):
        while not await client.client_list(_type="normal") or "xread" not in str(await client.client_list()):
            await asyncio.sleep(0.02)
        await client.xadd("k3:cancel", {"request_id": "r1"})
        assert await waiting == "r1"
    await cancels.aclose()
    await ledger.close()
