"""One group of ranks, over gloo: exchange rows, send, receive; a deadline on each, and one error for all that can end them."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroupGloo, Store, Work  # pyright: ignore[reportPrivateImportUsage]

from k3mesh.errors import EngineLost

Result = TypeVar("Result")


class Pending:
    """A transfer under way. It keeps its tensors alive; wait() returns when they may be used again."""

    def __init__(
        self,
        group: "Group",
        what: str,
        work: Work | None,
        tensors: Sequence[torch.Tensor],
        arrives: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        """`arrives`: (to, from) memory that is copied in the end."""
        self._group, self._what, self._work, self._tensors, self._arrives = group, what, work, tensors, arrives

    def wait(self) -> None:
        """Block until done. EngineLost: a peer died or the group's deadline passed."""
        work, self._work = self._work, None
        if work is not None:
            self._group.run(self._what, lambda: self._group.finish(work))
            if self._arrives is not None:
                self._arrives[0].copy_(self._arrives[1])


class Group:
    """Ranks that communicate, in ascending order. A group of one holds no process group and moves bytes by copying.

    Rows travel as bytes, so every dtype arrives bit for bit, and one primitive, the all-to-all, carries every collective:
    gloo's other algorithms are slower at the sizes of a decode round and reduce in an order that depends on an element's
    place in the tensor. A GPU's rows go by way of the host; nccl.NcclGroup takes them from where they are.
    """

    home = torch.device("cpu")  # where what travels must lie

    def __init__(self, name: str, ranks: Sequence[int], rank: int, store: Store | None, hostname: str, timeout_s: float):
        """Collective over `ranks` (global); `rank` is this process's global rank, `hostname` its own address."""
        self.name = name
        self.ranks = list(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.timeout = timedelta(seconds=timeout_s)
        self._backend: Any = None  # torch has no type stubs for a backend's methods
        if self.size > 1:
            self._backend = self.run("start", lambda: self._open(store, hostname))

    def _open(self, store: Store | None, hostname: str) -> Any:
        backend: Any = ProcessGroupGloo
        options = backend._Options()  # init_process_group would not let us choose the network device
        options._devices = [backend.create_device(hostname=hostname)]
        options._timeout = self.timeout
        return backend(store, self.rank, self.size, options)

    def finish(self, work: Work) -> None:
        """Wait for what the backend has under way, as long as the group's deadline lets."""
        work.wait(self.timeout)

    def exchange(
        self, out: torch.Tensor, rows: torch.Tensor, out_splits: Sequence[int], splits: Sequence[int], what: str
    ) -> Pending:
        """All-to-all: splits[r] rows of `rows` [n, ...] go to group rank r, in order; out_splits[r] rows of `out` [m, ...] come
        from r. Both contiguous and of one dtype and row shape. What r sends must be what its peer expects.
        """
        if self._backend is None:
            out.copy_(rows)
            return Pending(self, what, None, ())
        backend, sent, received = self._backend, _bytes(rows).to(self.home), self._twin(_bytes(out))
        work = self.run(what, lambda: backend.alltoall_base(received, sent, list(out_splits), list(splits)))
        return Pending(self, what, work, (received, sent), _arrival(out, received))

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Start sending to group rank `peer`, which must receive a tensor of the same shape and dtype."""
        assert self._backend is not None, f"group {self.name} has no peer"
        backend, sent = self._backend, _bytes(tensor.contiguous()).to(self.home)
        return Pending(
            self, f"send to rank {self.ranks[peer]}", self.run("send", lambda: backend.send([sent], peer, 0)), (sent,)
        )

    def receive(self, out: torch.Tensor, peer: int) -> Pending:
        """Start receiving from group rank `peer` into `out` (contiguous)."""
        assert self._backend is not None, f"group {self.name} has no peer"
        backend, received = self._backend, self._twin(_bytes(out))
        what = f"receive from rank {self.ranks[peer]}"
        work = self.run(what, lambda: backend.recv([received], peer, 0))
        return Pending(self, what, work, (received,), _arrival(out, received))

    def run(self, what: str, call: Callable[[], Result]) -> Result:
        """Run one call of the backend; whatever ends it early is EngineLost, for the engine is the unit of failure."""
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).partition(". This is typically")[0].partition("\n")[0]
            raise EngineLost(
                f"group {self.name} (ranks {self.ranks}): {what} ended early on rank {self.ranks[self.rank]}: {reason}; "
                "a peer died or did not take part in time, so the engine must restart"
            ) from error

    def close(self) -> None:
        """Let go of the connections. Peers still inside a call see EngineLost."""
        self._backend = None

    def _twin(self, memory: torch.Tensor) -> torch.Tensor:
        """Where the backend may write what is meant for `memory`: there itself if it is at home."""
        return memory if memory.device.type == self.home.type else torch.empty_like(memory, device=self.home)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous [n, ...] tensor's memory as [n, bytes of a row] uint8."""
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:])).view(torch.uint8)


def _arrival(out: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if out.device == received.device else (_bytes(out), received)
