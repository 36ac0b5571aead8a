"""tokens.npz on the training device, and batches of windows from it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Corpus:
    """The ids of `training.data`, drawn from at random."""

    def __init__(self, path: Path, device: torch.device):
        self.device = device
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name].astype(np.int32)).to(device) for name in arrays.files}

    def text(self, count: int, length: int, part: str = "") -> Tensor:
        """[count, length + 1] ids: windows that start anywhere in a file."""
        ids = self.arrays[f"text{part}"]
        return self._windows(ids, torch.randint(len(ids) - length - 1, (count,), device=self.device), length)

    def chat(self, count: int, length: int, part: str = "") -> Tensor:
        """[count, length + 1] ids: exchanges one after another, the first from its beginning."""
        ids, starts = self.arrays[f"chat{part}"], self.arrays[f"chat{part}_starts"]
        usable = int((starts < len(ids) - length - 1).sum())
        return self._windows(ids, starts[torch.randint(usable, (count,), device=self.device)].long(), length)

    def mixed(self, count: int, length: int, chats: float, part: str = "") -> Tensor:
        """A share `chats` of the rows is chat, the rest text."""
        split = round(count * chats)
        return torch.cat([self.chat(split, length, part), self.text(count - split, length, part)])

    def prompts(self, count: int, longest: int, part: str, answer_start: int, separator: int) -> tuple[Tensor, Tensor]:
        """[count, longest] ids and [count] lengths: half of the rows a question up to where the answer begins, half the
        beginning of a text window. An answer begins behind the first `separator` after the second `answer_start`."""
        chats = self.chat(count // 2, longest, part)[:, :longest]
        opens = (chats == answer_start).cumsum(1)  # user message, assistant message, response
        begins = ((opens == 3) & (chats == separator)).float().argmax(1) + 1
        fits = begins > 1
        texts = self.text(count - int(fits.sum()), longest, part)[:, :longest]
        lengths = torch.randint(longest // 4, longest + 1, (len(texts),), device=self.device)
        return torch.cat([chats[fits], texts]), torch.cat([begins[fits], lengths])

    def _windows(self, ids: Tensor, starts: Tensor, length: int) -> Tensor:
        return ids[starts[:, None] + torch.arange(length + 1, device=self.device)].long()
