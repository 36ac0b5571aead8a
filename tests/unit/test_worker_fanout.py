"""The leader hands its peers the same bytes in the same order, and each end notices that the other is gone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k3mesh.errors import ConfigError, EngineLost
from k3mesh.v1 import worker_pb2
from services.worker.fanout import Leader, Peer, socket_path

DEADLINE_S = 10


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    """A leader of two peers."""
    leader = Leader(socket_path(str(tmp_path), 4), peers=(5, 6))
    await leader.listen()
    yield leader
    await leader.close()
    assert not list(tmp_path.iterdir()), "the socket stays behind"


async def connect(tmp_path: Path, rank: int) -> Peer:
    return await Peer.connect(socket_path(str(tmp_path), 4), worker_pb2.WorkerHello(rank=rank, num_blocks=100 + rank))


async def test_peers_get_every_command_in_order_and_nothing_is_cut(leader: Leader, tmp_path: Path):
    peers = [await connect(tmp_path, rank) for rank in (5, 6)]
    hellos = await leader.hellos(DEADLINE_S)
    assert sorted(hello.num_blocks for hello in hellos) == [105, 106]
    commands = [
        worker_pb2.WorkerCommand(prefill={"step_id": n, "rows": [{"tokens": bytes([n]) * size}]})
        for n, size in enumerate((0, 1, 300_000, 7), start=1)
    ]

    async def read(peer: Peer) -> list[worker_pb2.WorkerCommand]:
        got: list[worker_pb2.WorkerCommand] = []
        async for command in peer.commands():
            got.append(command)
            if len(got) == len(commands):
                break
        return got

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        readers = [group.create_task(read(peer)) for peer in peers]
        for command in commands:
            await leader.send(command.SerializeToString())
    assert [reader.result() for reader in readers] == [commands, commands]
    for peer in peers:
        peer.close()


async def test_the_leader_does_not_start_before_all_peers_are_ready(leader: Leader, tmp_path: Path):
    peer = await connect(tmp_path, 5)
    with pytest.raises(EngineLost, match=r"tensor-parallel peers \[6\] are not ready"):
        await leader.hellos(0.05)
    peer.close()


async def test_strangers_on_the_socket_are_turned_away_and_nobody_comes_in_after_the_peers(leader: Leader, tmp_path: Path):
    path = socket_path(str(tmp_path), 4)
    first = await connect(tmp_path, 5)
    for data in (b"\xff\xff\xff\xff too long", b"\4\0\0\0\xff\xff\xff\xff", b"\0\0\0\0", b"\2\0\0\0\x18\5", b"\2\0"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)  # no frame, no hello, a hello without a rank, a second rank 5, half a length
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()
    last = await connect(tmp_path, 6)
    assert sorted(hello.rank for hello in await leader.hellos(DEADLINE_S)) == [5, 6]
    with pytest.raises(OSError):
        await asyncio.open_unix_connection(path)
    first.close()
    last.close()


async def test_the_end_of_a_peer_is_the_end_of_the_leader(leader: Leader, tmp_path: Path):
    stays, goes = [await connect(tmp_path, rank) for rank in (5, 6)]
    await leader.hellos(DEADLINE_S)
    goes.close()
    with pytest.raises(EngineLost, match="rank 6"):
        async with asyncio.timeout(DEADLINE_S):
            await leader.watch()
    stays.close()


async def test_the_end_of_the_leader_is_the_end_of_its_peers(tmp_path: Path):
    leader = Leader(socket_path(str(tmp_path), 4), peers=(5,))
    await leader.listen()
    peer = await connect(tmp_path, 5)
    await leader.hellos(DEADLINE_S)
    await leader.close()
    with pytest.raises(EngineLost, match="leader of this tensor-parallel group is gone"):
        async with asyncio.timeout(DEADLINE_S):
            async for _ in peer.commands():
                raise AssertionError("no command was sent")
    peer.close()


async def test_a_leader_without_peers_opens_no_socket(tmp_path: Path):
    leader = Leader(socket_path(str(tmp_path), 0), peers=())
    await leader.listen()
    assert await leader.hellos(DEADLINE_S) == []
    await leader.send(b"nobody")
    assert not list(tmp_path.iterdir())
    await leader.close()


async def test_a_run_directory_that_cannot_hold_a_socket_is_named(tmp_path: Path):
    leader = Leader(socket_path(str(tmp_path / ("x" * 120)), 0), peers=(1,))
    with pytest.raises(ConfigError, match="--run-dir"):
        await leader.listen()
    await leader.close()
