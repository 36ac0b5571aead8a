"""Whether counts may stem from a law."""

import math

import torch
from torch import Tensor

RARE = 5  # a cell that so few are expected in is counted together with the others of its kind


def chi_square(counts: Tensor, law: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts against probabilities of the same shape; infinite if a thing happened that
    cannot."""
    wanted, found = (law.double() * counts.sum()).flatten(), counts.double().flatten()
    impossible, rare = wanted == 0, wanted < RARE
    pooled = [torch.cat([of[~rare], of[rare].sum().unsqueeze(0)]) for of in (wanted, found)]
    wanted_cells, found_cells = (cells[pooled[0] > 0] for cells in pooled)
    if bool(found[impossible].any()):
        return math.inf, len(wanted_cells) - 1
    return float(((found_cells - wanted_cells).square() / wanted_cells).sum()), len(wanted_cells) - 1


def critical(freedom: int) -> float:
    """The chi-square value that one draw in ten thousand exceeds (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
