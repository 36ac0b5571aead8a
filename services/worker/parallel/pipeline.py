"""What a stage sends to the next one, rank to rank (same dp, same tp)."""

import torch

from services.worker.parallel.group import Group, Pending


class Pipeline:
    """The stages of one column of ranks. Both ends call in the same order, with shapes that both know from the step.

    Sending does not wait for the receiver, so that a stage computes its next chunk while the last one travels; at most one
    call's tensors are under way.
    """

    def __init__(self, group: Group):
        self._group = group
        self._sending: list[Pending] = []

    @property
    def is_first(self) -> bool:
        return self._group.rank == 0

    @property
    def is_last(self) -> bool:
        return self._group.rank == self._group.size - 1

    def send_next(self, *tensors: torch.Tensor) -> None:
        """Start sending to the next stage, after the previous call's tensors have left. The tensors must not be written
        until the next send_next or flush. EngineLost.
        """
        self.flush()
        self._sending = [self._group.send(tensor, self._group.rank + 1) for tensor in tensors]

    def recv_prev(self, *outs: torch.Tensor) -> None:
        """Fill `outs` (contiguous, shaped and typed as sent) from the previous stage, in the order of sending. EngineLost."""
        for pending in [self._group.receive(out, self._group.rank - 1) for out in outs]:
            pending.wait()

    def flush(self) -> None:
        """Wait until everything sent has left. EngineLost."""
        sending, self._sending = self._sending, []
        for pending in sending:
            pending.wait()
