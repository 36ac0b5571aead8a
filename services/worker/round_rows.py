"""What a decode round is told of its places, in one piece of memory: kept on the host, staged, and on the device at addresses
that never change."""

import torch
from torch import Tensor

LONG, INT = 8, 4  # bytes


class Rows:
    """n places: block table [n, columns] int32, slot and anchor's position [n], window [n, w] int64; zero is the null place."""

    def __init__(self, n: int, columns: int, width: int, device: torch.device | str = "cpu", pinned: bool = False):
        longs = n * (2 + width)
        self.memory = torch.zeros(longs * LONG + n * columns * INT, dtype=torch.uint8, device=device, pin_memory=pinned)
        words = self.memory[: longs * LONG].view(torch.int64)
        self.slots, self.positions, windows = words.split([n, n, n * width])
        self.windows = windows.view(n, width)
        self.tables = self.memory[longs * LONG :].view(torch.int32).view(n, columns)

    def reset(self, row: int) -> None:
        for tensor in (self.tables, self.slots, self.positions, self.windows):
            tensor[row] = 0

    def copy_from(self, other: "Rows", rows: Tensor) -> None:
        """This one's first len(rows) rows := rows of the other, both on the host."""
        n = len(rows)
        torch.index_select(other.tables, 0, rows, out=self.tables[:n])
        torch.index_select(other.slots, 0, rows, out=self.slots[:n])
        torch.index_select(other.positions, 0, rows, out=self.positions[:n])
        torch.index_select(other.windows, 0, rows, out=self.windows[:n])


class RoundRows:
    """The rows of the round that runs. On a CPU what is staged is what is read."""

    def __init__(self, n: int, columns: int, width: int, device: torch.device):
        cuda = device.type == "cuda"
        self._staged = Rows(n, columns, width, pinned=cuda)
        self.there = Rows(n, columns, width, device) if cuda else self._staged

    def fill(self, state: Rows, rows: Tensor) -> None:
        """The first len(rows) := rows of the state, by one copy to the device. The round before has been read."""
        self._staged.copy_from(state, rows)
        if self.there is not self._staged:
            self.there.memory.copy_(self._staged.memory, non_blocking=True)
