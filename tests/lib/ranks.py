"""A small engine of real processes, one a rank, that have joined their groups and run functions on request."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from services.contracts.topology import Topology
from services.worker.parallel.groups import Groups, join

DEADLINE_S = 60.0


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def decode_engine(dp: int, tp: int) -> Topology:
    """One stage: `dp` replicas of `tp` ranks whose experts are spread over all of them."""
    return Topology("decode", stages=1, dp_size=dp, tp_size=tp, ep_size=dp * tp, num_layers=4, partition=(4,))


def prefill_engine(stages: int, tp: int) -> Topology:
    return Topology("prefill", stages, dp_size=1, tp_size=tp, ep_size=tp, num_layers=4, partition=(4 // stages,) * stages)


class Ranks:
    """`run(function, *arguments)` calls function(groups, *arguments) on every rank at once."""

    def __init__(self, topology: Topology, timeout: float = DEADLINE_S, address: str = ""):
        context = multiprocessing.get_context("spawn")
        self.address = address or free_address()
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(topology.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, topology, rank, self.address, timeout), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)
        self._answers()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Each rank's result, in rank order; AssertionError with the traceback of any rank that raised."""
        for link in self._links:
            link.send((function, arguments))
        return self._answers()

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()
        del self._links[rank], self._processes[rank]

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(DEADLINE_S)
            assert process.exitcode == 0, f"rank process ended with {process.exitcode}"

    def _answers(self) -> list[Any]:
        answers: list[Any] = []
        for rank, link in enumerate(self._links):
            assert link.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
            answers.append(link.recv())
        failures = [text for failed, text in answers if failed]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]


def _serve(link: Connection, topology: Topology, rank: int, address: str, timeout: float) -> None:
    torch.set_num_threads(1)
    groups: Groups = join(topology, rank, address, startup_timeout=DEADLINE_S, timeout=timeout)
    link.send((False, None))
    try:
        while True:
            function, arguments = link.recv()
            try:
                link.send((False, function(groups, *arguments)))
            except Exception:
                link.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    except EOFError:
        groups.close()
