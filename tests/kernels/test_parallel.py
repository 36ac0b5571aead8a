"""Groups and collectives over real processes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from k3mesh.errors import ConfigError, EngineLost
from services.contracts.topology import Topology
from services.worker.parallel.groups import Groups, join
from tests.lib.ranks import Ranks, decode_engine, free_address, prefill_engine


@pytest.fixture(scope="module", params=[2, 4])
def tp_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(decode_engine(dp=1, tp=request.param))
    yield ranks
    ranks.close()


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(33, 24, generator=torch.Generator().manual_seed(rank)).to(dtype) * 10.0 ** (rank - 1)


def reduce_part(groups: Groups, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    return groups.tp.all_reduce(part(groups.tp.rank, dtype)[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_reduce_gives_every_rank_the_same_bits(tp_ranks: Ranks, dtype: torch.dtype) -> None:
    results = tp_ranks.run(reduce_part, dtype, slice(None))
    expected = part(0, dtype).float()
    for rank in range(1, len(results)):
        expected = expected + part(rank, dtype).float()
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, expected.to(dtype))


def test_all_reduce_of_a_row_does_not_depend_on_its_batch(tp_ranks: Ranks) -> None:
    whole = tp_ranks.run(reduce_part, torch.bfloat16, slice(None))[0]
    alone = tp_ranks.run(reduce_part, torch.bfloat16, slice(17, 18))[0]
    assert torch.equal(whole[17:18], alone)


def gather_marked(groups: Groups, rows: int) -> torch.Tensor:
    marked = torch.stack([torch.full((rows,), groups.tp.rank), torch.arange(rows)], dim=1)
    return groups.tp.all_gather(marked.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_all_gather_keeps_rank_and_row_order(tp_ranks: Ranks, rows: int) -> None:
    results = tp_ranks.run(gather_marked, rows)
    expected = [[rank, row] for rank in range(len(results)) for row in range(rows)]
    for result in results:
        assert result.tolist() == expected


def epoch_of(groups: Groups) -> int:
    return groups.epoch


def test_every_rank_holds_rank_0s_epoch(tp_ranks: Ranks) -> None:
    epochs = tp_ranks.run(epoch_of)
    assert epochs == [epochs[0]] * len(epochs)
    assert epochs[0] > 0


def test_a_world_of_one_needs_no_address_and_is_the_identity() -> None:
    groups = join(decode_engine(dp=1, tp=1), 0, "")
    x = part(0, torch.bfloat16)
    assert torch.equal(groups.tp.all_reduce(x), x)
    assert torch.equal(groups.tp.all_gather(x), x)
    assert groups.ep.size == 1
    assert groups.pipeline.is_first
    assert groups.pipeline.is_last
    groups.close()


def groups_seen(groups: Groups) -> tuple[list[int], list[int], list[int]]:
    return groups.tp.group.ranks, groups.ep.ranks, groups.stages.ranks


def pass_along(groups: Groups, chunks: int, rows: int) -> list[torch.Tensor]:
    """Each stage adds its number's power of ten; returns what the last stage ends with."""
    ended: list[torch.Tensor] = []
    for chunk in range(chunks):
        prefix, blocks = torch.full((rows, 3), float(chunk)), torch.zeros(2, rows, 3, dtype=torch.bfloat16)
        if not groups.pipeline.is_first:
            groups.pipeline.recv_prev(prefix, blocks)
        prefix, blocks = prefix + 10.0 ** (groups.stages.rank + 1), blocks + 1
        if groups.pipeline.is_last:
            ended += [prefix, blocks]
        else:
            groups.pipeline.send_next(prefix, blocks)
    groups.pipeline.flush()
    return ended


def test_stages_pass_chunks_in_order_to_the_next_rank_of_the_same_shard() -> None:
    ranks = Ranks(prefill_engine(stages=2, tp=2))
    try:
        assert ranks.run(groups_seen) == [
            ([0, 1], [0, 1], [0, 2]),
            ([0, 1], [0, 1], [1, 3]),
            ([2, 3], [2, 3], [0, 2]),
            ([2, 3], [2, 3], [1, 3]),
        ]
        for results in (ranks.run(pass_along, 3, 5), ranks.run(pass_along, 1, 0)):
            assert results[0] == results[1] == []
            for ended in results[2:]:
                for chunk in range(len(ended) // 2):
                    assert bool((ended[2 * chunk] == chunk + 110).all())
                    assert bool((ended[2 * chunk + 1] == 2).all())
    finally:
        ranks.close()


def reduce_unless_absent(groups: Groups, absent: int) -> str:
    if groups.tp.rank == absent:
        return "absent"
    with pytest.raises(EngineLost) as caught:
        groups.tp.all_reduce(torch.ones(2))
    return caught.value.message


def test_a_collective_without_one_rank_is_engine_lost_after_its_deadline() -> None:
    ranks = Ranks(decode_engine(dp=1, tp=2), timeout=0.5)
    try:
        message, absent = ranks.run(reduce_unless_absent, 1)
        assert absent == "absent"
        assert "all_gather" in message
        assert "ranks [0, 1]" in message
    finally:
        ranks.close()


def test_a_collective_with_a_dead_rank_is_engine_lost_at_once() -> None:
    ranks = Ranks(decode_engine(dp=1, tp=2))
    try:
        ranks.kill(1)
        [message] = ranks.run(reduce_unless_absent, 1)
        assert "the engine must restart" in message
    finally:
        ranks.close()


def test_join_names_the_rank_that_did_not_arrive() -> None:
    with pytest.raises(EngineLost, match=r"rank 1, 2, 3 did not arrive"):
        join(decode_engine(dp=4, tp=1), 0, free_address(), startup_timeout=0.5)


def test_join_without_rank_0_is_engine_lost() -> None:
    with pytest.raises(EngineLost, match=r"rank 0 does not answer"):
        join(decode_engine(dp=2, tp=1), 1, free_address(), startup_timeout=0.5)


def test_join_refuses_ranks_of_another_shape() -> None:
    address = free_address()
    errors: dict[int, Exception] = {}

    def start(rank: int, topology: Topology) -> None:
        try:
            join(topology, rank, address, startup_timeout=10)
        except ConfigError as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=start, args=(0, decode_engine(dp=2, tp=1))),
        threading.Thread(target=start, args=(1, decode_engine(dp=1, tp=2))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(errors) == {0, 1}
    assert "the same arguments" in str(errors[0])


def test_a_second_process_of_the_same_rank_is_turned_away() -> None:
    address, topology = free_address(), decode_engine(dp=2, tp=1)
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(join, topology, rank, address, 10) for rank in (0, 1)]
        groups = [future.result(30) for future in joined]
    with pytest.raises(EngineLost, match=r"another process is rank 1 of the engine"):
        join(topology, 1, address, startup_timeout=10)
    for one in groups:
        one.close()


def test_an_engine_restarts_at_the_same_address_with_a_later_epoch() -> None:
    topology = decode_engine(dp=2, tp=1)
    first = Ranks(topology)
    old = first.run(epoch_of)[0]
    first.kill(0)
    first.kill(0)
    again = Ranks(topology, address=first.address)
    try:
        assert again.run(epoch_of)[0] > old
    finally:
        again.close()


@pytest.mark.parametrize("address", ["", "localhost", "host:", "host:0", ":29500", "host:99999"])
def test_join_refuses_an_address_that_is_no_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="--dist-init-addr"):
        join(decode_engine(dp=2, tp=1), 0, address)


def test_join_refuses_a_taken_port() -> None:
    address = free_address()
    taken = TCPStore("127.0.0.1", int(address.rpartition(":")[2]), is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match="choose a free port"):
        join(decode_engine(dp=2, tp=1), 0, address, startup_timeout=0.5)
    del taken


def test_join_refuses_a_rank_outside_the_topology() -> None:
    with pytest.raises(ConfigError, match=r"--rank 2: the engine has ranks 0\.\.1"):
        join(decode_engine(dp=2, tp=1), 2, "127.0.0.1:1")
