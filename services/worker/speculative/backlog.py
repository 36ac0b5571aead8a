"""Drafter rows of rounds in which nobody drafts: written by the batch, not one by one, since nobody reads them meanwhile.

Where speculation is off it has to cost next to nothing, yet it must be able to come back for requests that are decoding. So
their rows are kept, and written when the replica drafts again, when a block of them is full (from then on other requests may
read it), and after ROUNDS rounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.contracts.ids import BLOCK_TOKENS
from services.worker.device import upload
from services.worker.speculative.drafter import Drafter

ROUNDS = 16  # K3: 5 taps of 14 KiB, 16 rounds of 32 requests are 35 MiB


@dataclass(frozen=True, slots=True)
class _Round:
    """One row of each of n requests."""

    inputs: tuple[Tensor, ...]  # of Drafter.inputs, [n, ...] each
    positions: Tensor  # [n] int64, on the host
    write_slots: Tensor  # [n] int64, likewise


class Backlog:
    """The rows of one replica that its drafter has not written yet."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self._rounds: list[_Round] = []

    def __len__(self) -> int:
        """Rows."""
        return sum(len(it.positions) for it in self._rounds)

    def add(self, inputs: tuple[Tensor, ...], positions: Tensor, write_slots: Tensor) -> None:
        """A round's rows, none of which was added before. Positions and slots are on the host; nothing may change after it."""
        self._rounds.append(_Round(inputs, positions, write_slots))
        if len(self._rounds) == ROUNDS:
            self.settle()

    def settle(self) -> None:
        """Write all of them. May be collective over TP, like Drafter.write."""
        if self._rounds:
            inputs = tuple(torch.cat(parts) for parts in zip(*(it.inputs for it in self._rounds), strict=True))
            rows = (torch.cat([getattr(it, name) for it in self._rounds]) for name in ("positions", "write_slots"))
            positions, write_slots = (upload(it, inputs[0].device) for it in rows)
            self._drafter.write(inputs, positions, write_slots)
            self._rounds.clear()

    def forget(self, blocks: Tensor) -> None:
        """The rows of these blocks will not be written: they may belong to somebody else by now."""
        kept = [(it, ~torch.isin(it.write_slots // BLOCK_TOKENS, blocks)) for it in self._rounds]
        self._rounds = [
            _Round(tuple(rows[stays.to(rows.device)] for rows in it.inputs), it.positions[stays], it.write_slots[stays])
            for it, stays in kept
            if bool(stays.any())
        ]
