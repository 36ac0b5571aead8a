"""tokens.npz on the training device, and batches of windows from it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.model import special_id


class Corpus:
    """The ids of `training.data`, drawn from at random."""

    def __init__(self, path: Path, device: torch.device):
        self.device = device
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name].astype(np.int32)).to(device) for name in arrays.files}

    def text(self, count: int, length: int, name: str = "text") -> Tensor:
        """[count, length + 1] ids: windows that start anywhere in a file."""
        ids = self.arrays[name]
        return self._windows(ids, torch.randint(len(ids) - length - 1, (count,), device=self.device), length)

    def chat(self, count: int, length: int, name: str = "chat") -> Tensor:
        """[count, length + 1] ids: exchanges one after another, the first from its beginning."""
        ids, starts = self.arrays[name], self.arrays[f"{name}_starts"]
        usable = int((starts < len(ids) - length - 1).sum())
        return self._windows(ids, starts[torch.randint(usable, (count,), device=self.device)].long(), length)

    def mixed(self, count: int, length: int, chats: float) -> Tensor:
        """A share `chats` of the rows is chat, the rest text."""
        split = round(count * chats)
        return torch.cat([self.chat(split, length), self.text(count - split, length)])

    def questions(self, count: int, longest: int, name: str) -> tuple[Tensor, Tensor]:
        """About `count` questions up to where their answers begin: [n, longest] ids and [n] lengths; longer ones fall out. An
        answer begins behind the separator after the third opening, which are user message, assistant message, response."""
        opening, separator = special_id("<|open|>"), special_id("<|sep|>")
        rows = self.chat(count, longest, name)[:, :longest]
        begins = (((rows == opening).cumsum(1) == 3) & (rows == separator)).float().argmax(1) + 1
        return rows[begins > 1], begins[begins > 1]

    def openings(self, count: int, longest: int, name: str) -> tuple[Tensor, Tensor]:
        """[count, longest] ids and [count] lengths: beginnings of text windows."""
        rows = self.text(count, longest, name)[:, :longest]
        return rows, torch.randint(longest // 4, longest + 1, (count,), device=self.device)

    def _windows(self, ids: Tensor, starts: Tensor, length: int) -> Tensor:
        return ids[starts[:, None] + torch.arange(length + 1, device=self.device)].long()
