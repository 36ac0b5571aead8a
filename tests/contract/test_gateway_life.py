"""The gateway over time: clients that leave, a mesh that comes and goes, Redis away, overload, shutdown, metrics."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from k3mesh.errors import BadRequest, EngineLost, Overloaded
from k3mesh.v1 import request_pb2
from tests.lib.byte_tokenizer import write_tokenizer
from tests.lib.gateway import RunningGateway, free_port, running_gateway
from tests.lib.redis_server import RedisServer
from tests.lib.scripted_mesh import ScriptedMesh

# Each character is a token of its own.
COMPLETION = {"model": "tiny", "prompt": "ABCDEFGH", "temperature": 0}


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
async def gateway(model: Path, redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, redis_server.url) as running:
        yield running


async def send(
    gateway: RunningGateway, body: dict[str, Any], request_id: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A POST whose answer is not read yet."""
    reader, writer = await gateway.connect()
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    return reader, writer


async def metrics(gateway: RunningGateway) -> dict[tuple[str, ...], float]:
    """(name, values of its labels in the order of their names...) -> value."""
    text = (await gateway.http.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_acceptance_is_counted_in_usage_and_metrics(gateway):
    plain = (await gateway.http.post("/v1/completions", json=COMPLETION)).json()
    assert "completion_tokens_details" not in plain["usage"], "without a drafter there is nothing to tell"
    gateway.mesh.script.drafts = request_pb2.Drafts(windows=4, proposed=12, accepted=6, accepted_at=[3, 2, 1])
    answer = (await gateway.http.post("/v1/completions", json=COMPLETION | {"n": 2})).json()
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 12,
        "rejected_prediction_tokens": 12,
    }
    counted = await metrics(gateway)
    totals = {"num_drafts": 8, "num_draft_tokens": 24, "num_accepted_tokens": 12}
    assert {name: counted[f"k3mesh_spec_decode_{name}_total",] for name in totals} == totals
    at = [counted["k3mesh_spec_decode_num_accepted_tokens_per_pos_total", position] for position in "012"]
    assert at == [6, 4, 2]
    assert counted["k3mesh_spec_decode_acceptance_length_count",] == 2
    assert counted["k3mesh_spec_decode_acceptance_length_sum",] == 2 * (1 + 6 / 4)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["queued", "decoding"])
async def test_a_client_that_leaves_is_cancelled_on_the_mesh_and_counted_as_such(gateway, stream, where):
    script = gateway.mesh.script
    script.hold_queue, script.hold_after = where == "queued", 2
    reader, writer = await send(gateway, COMPLETION | {"stream": stream}, "leaver")
    await gateway.mesh.until(lambda mesh: "leaver" in mesh.live)
    if stream and where == "decoding":
        await reader.readuntil(b'"text":"B"')
    writer.close()
    await gateway.mesh.until(lambda mesh: mesh.ended.get("leaver") == "cancelled")
    counted = await metrics(gateway)
    assert counted["k3mesh_requests_total", "completions", "cancelled"] == 1
    assert counted["k3mesh_num_requests_waiting",] == counted["k3mesh_num_requests_running",] == 0


async def test_a_client_that_does_not_read_is_cancelled_when_its_buffer_is_full(model, redis_server):
    mesh = ScriptedMesh(max_model_len=100_000)
    mesh.script.answer = lambda prompt: prompt * 10_000
    mesh.script.hold_after = 70_000  # it does not end by itself
    async with running_gateway(model, redis_server.url, mesh, max_buffered_bytes=1 << 16) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.port))
            body = json.dumps(COMPLETION | {"stream": True, "max_tokens": 80_000}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: deaf\r\n"
            client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            await mesh.until(lambda mesh: mesh.ended.get("deaf") == "cancelled")


async def test_one_request_too_many_is_429_with_retry_after_and_the_place_comes_back(model, redis_server):
    async with running_gateway(model, redis_server.url, max_queued_requests=2) as gateway:
        gateway.mesh.script.hold_queue = True
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(gateway.http.post("/v1/completions", json=COMPLETION)) for _ in range(2)]
            await gateway.mesh.until(lambda mesh: len(mesh.live) == 2)
            third = await gateway.http.post("/v1/completions", json=COMPLETION)
            assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(third.headers["retry-after"]) >= 1
            gateway.mesh.script.release.set()
        assert [(await task).status_code for task in first] == [200, 200]
        assert (await gateway.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_the_request_id_is_the_clients_if_it_may_be_one(gateway):
    good = await gateway.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "my.id-1"})
    assert good.headers["x-request-id"] == "my.id-1" and good.json()["id"] == "cmpl-my.id-1"
    bad = await gateway.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "no spaces!"})
    assert bad.headers["x-request-id"] != "no spaces!"
    assert set(gateway.mesh.requests) == {"my.id-1", bad.headers["x-request-id"]}


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(gateway):
    gateway.mesh.script.hold_queue = True
    headers = {"x-request-id": "twice"}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.http.post("/v1/completions", json=COMPLETION, headers=headers))
        await gateway.mesh.until(lambda mesh: "twice" in mesh.live)
        second = await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert (second.status_code, second.json()["error"]["code"]) == (400, "request_id_in_use")
        gateway.mesh.script.release.set()
    assert (await first).status_code == 200
    assert (await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


async def test_a_deadline_is_504(model, redis_server):
    async with running_gateway(model, redis_server.url, request_timeout=0.3) as gateway:
        gateway.mesh.script.hold_queue = True
        response = await gateway.http.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_gateway_that_starts_before_its_mesh_says_so_and_heals(model, redis_server):
    async with running_gateway(model, redis_server.url, start_mesh=False) as gateway:
        health = await gateway.http.get("/health")
        assert health.status_code == 503 and "does not answer" in health.json()["error"]["message"]
        assert (await gateway.http.get("/liveness")).status_code == 200
        early = await gateway.http.post("/v1/completions", json=COMPLETION)
        assert early.status_code == 503 and "retry-after" in early.headers
        gateway.mesh.not_ready = "decode-0 is loading"
        await gateway.mesh.start(gateway.mesh.address)
        await becomes(gateway, 503, "decode-0 is loading")
        gateway.mesh.not_ready = ""
        await becomes(gateway, 200)
        assert (await gateway.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        await gateway.mesh.stop()
        lost = await gateway.http.post("/v1/completions", json=COMPLETION)
        assert lost.status_code == 503 and "retry-after" in lost.headers
        assert (await gateway.http.get("/health")).status_code == 503
        await gateway.mesh.start(gateway.mesh.address)
        await becomes(gateway, 200)
        assert (await gateway.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def becomes(gateway: RunningGateway, status: int, names: str = "") -> None:
    """/health says so within the time that a lost connection takes to come back."""
    async with asyncio.timeout(15):
        while True:
            health = await gateway.http.get("/health")
            if health.status_code == status and names in health.text:
                return
            await asyncio.sleep(0.05)


async def test_without_redis_new_requests_are_503_and_running_ones_finish(gateway, redis_server):
    gateway.mesh.script.hold_after = 2
    async with asyncio.TaskGroup() as group:
        running = group.create_task(gateway.http.post("/v1/completions", json=COMPLETION))
        await gateway.mesh.until(lambda mesh: len(mesh.live) == 1)
        redis_server.stop()
        await becomes(gateway, 503, "Redis is away")
        refused = await gateway.http.post("/v1/completions", json=COMPLETION)
        assert refused.status_code == 503 and "Redis" in refused.json()["error"]["message"]
        gateway.mesh.script.release.set()
    assert (await running).json()["choices"][0]["text"] == "ABCDEFGH"
    redis_server.start()
    await becomes(gateway, 200)
    assert (await gateway.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_the_journal_has_what_the_mesh_got_and_what_it_refused_but_nothing_invalid(gateway, redis_server):
    headers = [{"x-request-id": name} for name in ("taken", "refused", "invalid", "another")]
    await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers[0])
    gateway.mesh.script.refuse = Overloaded("the queue is full")
    await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers[1])
    await gateway.http.post("/v1/completions", json=COMPLETION | {"n": "x"}, headers=headers[2])
    gateway.mesh.script.refuse = BadRequest("in use", detail="request_id_in_use")  # by a request of another gateway
    await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers[3])
    gateway.process.stopping.set()  # the ledger writes what is left when the gateway ends

    async with asyncio.timeout(10):
        with redis_server.client() as redis:
            while redis.hget("k3:req:refused", "state") != "FAILED":
                await asyncio.sleep(0.02)
            assert redis.hget("k3:req:taken", "state") == "RECEIVED"
            assert redis.hget("k3:req:refused", "error") == "overloaded"
            assert [fields["state"] for _, fields in redis.xrange("k3:req:refused:log")] == ["RECEIVED", "FAILED"]
            assert redis.keys("k3:req:invalid*") == []
            assert redis.hget("k3:req:another", "state") == "RECEIVED"  # not ended by the one that came second


async def test_a_request_whose_stream_breaks_is_failed_in_the_journal(gateway, redis_server):
    gateway.mesh.script.hold_after = 2
    async with asyncio.TaskGroup() as group:
        broken = group.create_task(gateway.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "broken"}))
        await gateway.mesh.until(lambda mesh: len(mesh.live) == 1)
        await gateway.mesh.stop()
    assert (await broken).status_code == 503
    async with asyncio.timeout(10):
        with redis_server.client() as redis:
            while redis.hget("k3:req:broken", "state") != "FAILED":
                await asyncio.sleep(0.02)
            assert redis.hget("k3:req:broken", "error") == "engine_lost" and not redis.keys("k3:live:*")


async def test_metrics_count_tokens_and_times_and_show_the_schedulers(gateway):
    for _ in range(10):
        assert (await gateway.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 5})).status_code == 200
    await gateway.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 0})
    gateway.mesh.script.refuse = EngineLost("decode-0 died")
    await gateway.http.post("/v1/completions", json=COMPLETION)
    counted = await metrics(gateway)
    assert counted["k3mesh_requests_total", "completions", "finished"] == 10
    assert counted["k3mesh_requests_total", "completions", "bad_request"] == 1
    assert counted["k3mesh_requests_total", "completions", "engine_lost"] == 1
    assert counted["k3mesh_time_to_first_token_seconds_count",] == 10
    assert counted["k3mesh_inter_token_latency_seconds_count",] == 40
    assert counted["k3mesh_generation_tokens_total",] == 50
    assert counted["k3mesh_e2e_request_latency_seconds_count", "completions"] == 10
    assert counted["k3mesh_scheduler_queued", "prefill-0", "prefill-scheduler"] == 3
    assert counted["k3mesh_scheduler_requests_finished_total", "prefill-0", "prefill-scheduler"] == 5
    assert counted["k3mesh_scheduler_residents", "decode-0", "decode-scheduler"] == 2
    await gateway.mesh.stop()
    assert ("k3mesh_requests_total", "completions", "finished") in await metrics(gateway)


async def test_version_is_the_packages(gateway):
    assert (await gateway.http.get("/version")).json()["version"].count(".") == 2


async def test_a_gateway_told_to_stop_ends_its_streams_and_refuses_new_requests(gateway):
    gateway.mesh.script.hold_after = 2
    reader, writer = await send(gateway, COMPLETION | {"stream": True}, "last")
    await reader.readuntil(b'"text":"B"')
    gateway.process.stopping.set()
    await becomes(gateway, 503, "shutting down")
    assert (await gateway.http.get("/liveness")).status_code == 200
    assert (await gateway.http.post("/v1/completions", json=COMPLETION)).status_code == 503
    gateway.mesh.script.release.set()
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    writer.close()


async def process(*flags: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "services.gateway.main", *flags]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."})


async def test_a_port_in_use_is_one_clear_line_and_exit_2(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--model", str(model), "--prefill-address", "127.0.0.1:1", "--redis-url", "unix:///nothing", "--port", port]
        gateway = await process(*flags)
        _, told = await asyncio.wait_for(gateway.communicate(), 30)
    assert gateway.returncode == 2
    assert f"error: --host 127.0.0.1 --port {port}: the address cannot be bound (Address already in use)" in told.decode()


async def test_absent_redis_is_one_clear_line_and_exit_2(model):
    flags = ["--model", str(model), "--prefill-address", "127.0.0.1:1", "--redis-url", "unix:///nothing", "--port", "0"]
    gateway = await process(*flags)
    _, told = await asyncio.wait_for(gateway.communicate(), 30)
    assert gateway.returncode == 2
    assert "error: --redis-url unix:///nothing: Redis does not answer" in told.decode()


async def test_sigterm_ends_the_process_with_exit_0(model, redis_server):
    port = free_port()
    flags = ["--model", str(model), "--prefill-address", "127.0.0.1:1", "--redis-url", redis_server.url, "--port", str(port)]
    gateway = await process(*flags)
    assert gateway.stderr is not None
    try:
        async with asyncio.timeout(30):
            async for line in gateway.stderr:
                if b'"ready"' in line:
                    break
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{port}/liveness")).status_code == 200
        gateway.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.wait(), 20) == 0
    finally:
        if gateway.returncode is None:
            gateway.kill()
