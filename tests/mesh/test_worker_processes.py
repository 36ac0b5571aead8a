"""Real worker processes of both engines: tokens across their parallel shapes, the export, and what each loss does."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3mesh.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from services.contracts.geometry import blocks_for
from services.runtime.channels import open_channel
from tests.lib.golden import TINY, Engine, golden_model, needs_golden, request, topology_of
from tests.lib.worker_process import AgentEnd, Workers, workers

pytestmark = [needs_golden, pytest.mark.timeout(300)]
PREFILL = ("--disaggregation-mode", "prefill", "--num-blocks", "12", "--num-slots", "6", "--max-num-seqs", "4")
DECODE = ("--disaggregation-mode", "decode", "--num-blocks", "12", "--num-slots", "6", "--max-num-seqs", "4")
DECODE += ("--low-latency-max-num-tokens-per-gpu", "8", "--max-model-len", "512")
EXIT_CONFIG, EXIT_ENGINE_LOST = 2, 3
NO_AGENT = "error: --agent-socket"
GREEDY = common_pb2.Sampling(top_p=1, max_tokens=100)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens, each by recomputing everything before it."""
    reference = Engine(TINY, topology_of(golden_model(TINY)), torch.float32)
    tokens = list(prompt)
    for _ in range(count):
        logits = reference.step([(request(tokens), len(tokens))], "extend")
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def chunk(prompt: list[int], start: int, end: int, blocks: Sequence[int], room: int = 1, slot: int = 1) -> worker_pb2.ChunkRow:
    last = end == len(prompt)
    return worker_pb2.ChunkRow(
        request_id=f"r{room}", room=room, start=start, end=end, last=last, slot=slot,
        tokens=b"".join(token.to_bytes(4, "little") for token in prompt[start:end]),
        new_blocks=blocks[blocks_for(start) : blocks_for(end)], sampling=GREEDY if last else None,
    )  # fmt: skip


async def prefill(engine: Workers, prompt: list[int], blocks: Sequence[int], cut: int) -> int:
    """Run a prompt in two chunks that are in flight together -> its first token."""
    steps = [
        worker_pb2.PrefillStep(step_id=1, rows=[chunk(prompt, 0, cut, blocks)]),
        worker_pb2.PrefillStep(step_id=2, rows=[chunk(prompt, cut, len(prompt), blocks)]),
    ]
    for drive in engine.drives:
        for step in steps:
            await drive.send(prefill=step)
    first: list[worker_pb2.FirstToken] = []
    for drive in engine.drives:
        for step in steps:
            report = await drive.report()
            assert report.step.step_id == step.step_id, report
            first += report.step.first_tokens
    (token,) = first
    return token.token


def hand_over(sources: Sequence[AgentEnd], target: AgentEnd, blocks: Sequence[tuple[int, int]], slots: tuple[int, int]) -> None:
    """Copy a request's units from the prefill ranks' arenas to a decode rank's, as the agents would."""
    wanted = {field.field_id: field for field in target.placement.fields}
    for source in sources:
        for field in source.placement.fields:
            there = wanted.pop(field.field_id)
            assert (there.payload, there.dtype) == (field.payload, field.dtype)
            for ours, theirs in blocks if field.kind == "paged" else [slots]:
                target.unit(there, theirs)[:] = source.unit(field, ours)
    assert not wanted, f"fields that no stage owns: {sorted(wanted)}"


@pytest.mark.parametrize(
    ("stages", "prefill_tp", "replicas", "decode_tp"),
    [(2, 1, 2, 1), (1, 2, 1, 2)],
    ids=["P PP2, D DP2 EP2", "P TP2, D TP2"],
)
async def test_tokens_equal_a_full_recompute_with_a_way_to_host_memory_and_back(
    tmp_path: Path, stages: int, prefill_tp: int, replicas: int, decode_tp: int
):
    prompt, theirs, ours = prompt_of(150), [4, 9], [3, 7]
    folders = [tmp_path / name for name in ("p", "d")]
    for folder in folders:
        folder.mkdir()
    p_flags = (*PREFILL, "--pipeline-parallel-size", str(stages))
    d_flags = (*DECODE, "--data-parallel-size", str(replicas))
    async with (
        workers(folders[0], *p_flags, world=stages * prefill_tp, tp=prefill_tp) as p,
        workers(folders[1], *d_flags, world=replicas * decode_tp, tp=decode_tp) as d,
    ):
        p_hellos, d_hellos = await p.drive(), await d.drive()
        assert len({hello.engine_epoch for hello in p_hellos}) == len({hello.engine_epoch for hello in d_hellos}) == 1
        assert {hello.model_fingerprint for hello in p_hellos} == {hello.model_fingerprint for hello in d_hellos}
        tokens = [await prefill(p, prompt, theirs, 128)]
        for agent in p.agents[-prefill_tp:]:
            await agent.until("handoff")
        replica = replicas - 1  # the other replicas idle along
        for t in range(decode_tp):
            hand_over(p.agents[t::prefill_tp], d.agents[replica * decode_tp + t], list(zip(theirs, ours, strict=True)), (1, 5))
        install = worker_pb2.PlaceInstall(
            place=1, room=1, blocks=ours, slot=5, position=len(prompt), window=tokens, sampling=GREEDY
        )
        position = len(prompt)

        async def round(number: int, live: bool, **changes: Any) -> list[int]:
            """-> rooms whose images were copied"""
            for index, drive in enumerate(d.drives):
                mine = index == replica
                plan = worker_pb2.RoundPlan(
                    round_id=number, bucket=2 if live else 0, mode=worker_pb2.ROUND_MODE_LOW_LATENCY_EAGER,
                    live=[1] if mine and live else [], width=1, **(changes if mine else {}),
                )  # fmt: skip
                await drive.send(round=plan)
            results = [(await drive.report()).round for drive in d.drives]
            assert [result.replica for result in results] == list(range(replicas))
            assert [len(result.places) for result in results] == [0] * replica + [int(live)]
            tokens.extend(results[-1].tokens)
            return [room for result in results for room in result.copied]

        await round(1, True, installs=[install])
        await round(2, True)
        away = {"place": 1, "room": 1, "position": position + 2, "image": range(2 + d_hellos[0].state_blocks)}
        assert await round(3, False, retracts=[away]) == [1]
        home = worker_pb2.PlaceInstall(
            place=0, room=1, blocks=[7, 11], slot=2, position=position + 2, window=tokens[-1:], sampling=GREEDY
        )
        assert await round(4, False, restores=[{"install": home, "image": away["image"]}]) == [1]
        assert await round(5, False, retracts=[{**away, "place": 0}]) == [1]
        home.place, home.slot, home.blocks[:] = 1, 4, [2, 9]
        assert await round(6, True, restores=[{"install": home, "image": away["image"]}]) == [1]
        await round(7, True)
    assert tokens == expected_tokens(prompt, 5)


async def test_each_rank_tells_its_agent_what_it_wrote_and_when(tmp_path: Path):
    prompt = prompt_of(130)
    flags = (*PREFILL, "--pipeline-parallel-size", "2", "--disaggregation-layerwise-interval", "3")
    async with workers(tmp_path, *flags, world=2) as engine:
        await engine.drive()
        token = await prefill(engine, prompt, [2, 5], 128)
        for drive in engine.drives:
            await drive.send(forget=worker_pb2.ForgetRooms(rooms=[1]))
        for rank, (agent, layers) in enumerate(zip(engine.agents, (7, 6), strict=True)):
            messages = await agent.until("forget")
            intervals = [(lo, min(lo + 3, layers)) for lo in range(0, layers, 3)]
            expected: list[transfer_pb2.LocalMessage] = []
            for step, (start, end, block) in enumerate(((0, 128, 2), (128, 130, 5)), start=1):
                row = {"room": 1, "start": start, "end": end, "last": step == 2, "slot": 1, "new_blocks": [block]}
                expected.append(transfer_pb2.LocalMessage(chunk={"step_id": step, "rows": [row]}))
                expected += [transfer_pb2.LocalMessage(ready={"step_id": step, "lo": lo, "hi": hi}) for lo, hi in intervals]
            if rank == 1:
                handoff = {"token": token, "window": [token], "cached_tokens": 0}
                expected.append(transfer_pb2.LocalMessage(handoff={"room": 1, "handoff": handoff}))
            expected.append(transfer_pb2.LocalMessage(forget={"rooms": [1]}))
            assert messages == expected


async def test_a_ready_worker_serves_health_and_reports_its_counters(tmp_path: Path):
    async with workers(tmp_path, *PREFILL) as engine:
        (hello,) = await engine.drive()
        assert (hello.num_blocks, hello.num_slots, hello.vocab_size, list(hello.end_token_ids)) == (12, 6, 512, [258])
        assert hello.model_name == TINY
        async with open_channel(engine.addresses[0]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(service="k3mesh.v1.WorkerControl"))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            await engine.send(prefill=worker_pb2.PrefillStep(step_id=1, rows=[chunk(prompt_of(5), 0, 5, [3])]))
            counters = await worker_pb2_grpc.WorkerControlStub(channel).Inspect(common_pb2.InspectRequest())
        assert dict(counters.counters) == {"rooms": 1, "blocks_in_tables": 1, "pending_steps": 0, "tasks": 1}
        totals = dict(counters.totals)
        assert totals.pop("memory_peak_bytes") > 50 << 20, "of a process that has loaded torch"
        assert totals == {"steps": 1, "tokens": 5}
        engine.processes[0].send_signal(signal.SIGTERM)
        assert await engine.exit_code(0) == 0


async def test_a_worker_whose_scheduler_goes_ends_its_epoch(tmp_path: Path):
    async with workers(tmp_path, *PREFILL) as engine:
        await engine.drive()
        await engine.drives[0].close()
        assert await engine.exit_code(0) == EXIT_ENGINE_LOST
        assert "scheduler test" in engine.log(0)


async def test_a_worker_whose_agent_goes_reports_it_and_ends_its_epoch(tmp_path: Path):
    async with workers(tmp_path, *PREFILL) as engine:
        await engine.drive()
        engine.agents[0].hang_up()
        report = await engine.drives[0].report()
        assert (report.failure.code, report.failure.retryable) == ("engine_lost", True)
        assert "agent is gone" in report.failure.message
        assert await engine.drives[0].finished() == grpc.StatusCode.OK
        assert await engine.exit_code(0) == EXIT_ENGINE_LOST


@pytest.mark.parametrize("victim", [0, 1], ids=["the leader", "the peer"])
async def test_a_tensor_parallel_group_dies_together(tmp_path: Path, victim: int):
    async with workers(tmp_path, *PREFILL, world=2, tp=2) as engine:
        await engine.drive()
        engine.processes[victim].kill()
        assert await engine.exit_code(1 - victim) == EXIT_ENGINE_LOST
        if victim == 1:
            assert "rank 1, a tensor-parallel peer, is gone" in (await engine.drives[0].report()).failure.message
        else:
            assert "leader of this tensor-parallel group is gone" in engine.log(1)


async def test_a_step_that_fails_is_reported_with_its_reason(tmp_path: Path):
    async with workers(tmp_path, *PREFILL) as engine:
        await engine.drive()
        (report,) = await engine.send(prefill=worker_pb2.PrefillStep(step_id=1, rows=[chunk([1, 2, 3], 0, 2, [0])]))
        assert report.failure.code == "engine_lost"
        assert "null block" in report.failure.message
        assert await engine.exit_code(0) == EXIT_ENGINE_LOST


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/nowhere"), "error: --model /nowhere: no such directory"),
        (("--moe-backend", "marlin", "--dtype", "bfloat16"), "error: --moe-backend marlin: needs an NVIDIA GPU"),
        (("--startup-timeout", "0.2"), NO_AGENT),
        (("--listen", "192.0.2.1:1"), "error: --listen 192.0.2.1:1: the address cannot be bound"),
    ],
    ids=["no model", "no GPU", "no agent", "no address"],
)
async def test_a_worker_that_cannot_start_says_why(tmp_path: Path, flags: Sequence[str], message: str):
    async with workers(tmp_path, *PREFILL, *flags, agents=message != NO_AGENT) as engine:
        assert await engine.exit_code(0) == EXIT_CONFIG
        assert message in engine.log(0)
