"""The order of the weights that the wgmma experts read, undone as their kernel undoes it, bit by bit."""

import pytest
import torch
from torch import Tensor

from kernels.reference.mxfp4 import dequantize
from kernels.wgmma import layout
from tests.lib.conformance import Data

ROWS, COLUMNS = 512, 384
PAIR = 0x81C081C0  # sign, two bits of exponent and one of mantissa of a bfloat16, twice


def four_pairs(word: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    third, fourth = word & 0x40074007, word & 0x2E002E00
    return word & PAIR, word << 3 & PAIR, (third << 6) + (third << 1) & PAIR, (fourth >> 3 | fourth << 2) & PAIR


def bfloat16(bits: Tensor) -> Tensor:
    return (bits.to(torch.int32) << 16).view(torch.float32)


def read_back(pieces: Tensor) -> Tensor:
    """[n, k] as the lanes of products.cu hold it in A."""
    out = torch.full((ROWS, COLUMNS), float("nan"), dtype=torch.float64)
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    split = layout.TILE * layout.DEPTH // 2
    for tile, stages in enumerate(pieces):
        for stage, piece in enumerate(stages):
            words = piece[:split].view(torch.int32).view(16, 2, 32, 4).to(torch.int64) & 0xFFFFFFFF
            scales = piece[split:].view(16, 32, 2).to(torch.int64)
            for sixteen in range(16):
                for step in range(8):
                    pairs = four_pairs(words[sixteen, step // 4, :, step % 4])
                    for number, (pair, row, column) in enumerate(zip(pairs, (0, 8, 0, 8), (0, 0, 8, 8), strict=True)):
                        scale = bfloat16(scales[sixteen, :, number % 2] << 7).double()
                        for odd in (0, 1):
                            place = stage * layout.DEPTH + step * 16 + column + 2 * t + odd
                            bits = pair >> (16 * odd) & 0xFFFF
                            out[tile * layout.TILE + sixteen * 16 + row + g, place] = bfloat16(bits).double() * scale
    return out


@pytest.mark.parametrize("rows", [layout.first_rows(ROWS // 2), layout.second_rows(ROWS)], ids=["first product", "second"])
@pytest.mark.parametrize("largest", [128, 200])
def test_every_weight_stands_where_its_lane_looks_and_keeps_its_value(rows: Tensor, largest: int):
    packed, scale = Data(1).bytes(ROWS, COLUMNS // 2).cpu(), Data(2).bytes(ROWS, COLUMNS // 32, low=105, high=120).cpu()
    scale[3, 5] = largest
    places, shrink = layout.places(COLUMNS), layout.excess(scale)
    assert shrink == largest - 128
    assert rows.sort().values.equal(torch.arange(ROWS)) and places.sort().values.equal(torch.arange(COLUMNS))
    weights = read_back(layout.arrange(packed, scale, rows, shrink)) * 2.0**shrink
    assert torch.equal(weights, dequantize(packed, scale, torch.float64)[rows][:, places])


def test_a_stage_meets_the_columns_of_one_scale_in_one_lane():
    places = layout.places(2 * layout.DEPTH).view(2, 8, 2, 4, 2)  # stage, 16 columns, first or second 8, lane, even or odd
    groups = places // layout.GROUP
    assert torch.equal(groups, torch.arange(8).view(2, 1, 1, 4, 1).expand_as(groups))
