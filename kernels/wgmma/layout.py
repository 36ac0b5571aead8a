"""MXFP4 weights as products.cu reads them: stage after stage of TILE rows by DEPTH columns, one contiguous piece each.

A piece holds, for each sixteen of the tile's rows, for both halves of the columns and for each lane of a warp, 16 bytes: one
32-bit word for every 16 columns. Lane 4 g + t has rows g and g + 8 of the sixteen, and of the 16 columns the places 2t, 2t + 1,
2t + 8 and 2t + 9, as wgmma wants A in registers. Even places are in the lower half of the word; BITS says where in a half. Then
come the scales: for each sixteen and lane two bytes, of rows g and g + 8.

Columns are not in their order: `places` lets each lane meet the columns of one scale alone in a stage. What stands in the
images of rows is in the same order.
"""

import torch
from torch import Tensor

TILE, DEPTH, GROUP = 256, 128, 32
STAGE_BYTES = TILE * DEPTH // 2 + TILE * DEPTH // GROUP
# Where in a half word: (first bit of the magnitude, bit of the sign), for row g, row g + 8, and both 8 columns on.
BITS = ((6, 15), (3, 12), (0, 14), (9, 13))
# A weight in a bfloat16's bits is 2^126 too small; scales are stored as a bfloat16's exponents (bias 127) that bring it back.
EXPONENT = 126
LARGEST = 254 - EXPONENT  # E8M0 scale that a bfloat16's exponent can so hold


def excess(scale: Tensor) -> int:
    """By how many powers of two scales [...] E8M0 must shrink to fit; the product grows as much."""
    return max(0, int(scale.max()) - LARGEST) if scale.numel() else 0


def places(width: int) -> Tensor:
    """Which column stands where: of a stage's four groups, a pair each in turn; [width]."""
    return torch.arange(width).view(-1, DEPTH // GROUP, GROUP // 2, 2).transpose(1, 2).flatten()


def first_rows(inner: int) -> Tensor:
    """Which row of w13 stands where: eight gate rows, then the eight up rows of the same columns, columns in their places."""
    columns = places(inner).view(-1, 1, 8)
    return torch.cat([columns, columns + inner], dim=1).flatten()


def second_rows(latent: int) -> Tensor:
    """Which row of w2 stands where: so that a lane's four sums, transposed, are neighbours."""
    lane = torch.arange(4).view(4, 1) * 4 + torch.arange(2)
    sixteen = torch.cat([lane.flatten(), lane.flatten() + 2])
    return (torch.arange(0, latent, 16).view(-1, 1) + sixteen).flatten()


def arrange(packed: Tensor, scale: Tensor, rows: Tensor, shrink: int) -> Tensor:
    """One matrix: packed [n, k / 2] and scale [n, k / 32] uint8 as loaded -> [n / TILE, k / DEPTH, STAGE_BYTES] uint8."""
    packed, scale = packed[rows.to(packed.device)], scale[rows.to(scale.device)]
    tiles, stages = packed.shape[0] // TILE, packed.shape[1] * 2 // DEPTH
    pairs = packed.view(*packed.shape[:1], stages, DEPTH // GROUP, GROUP // 2).transpose(2, 3)  # a byte is a pair: in places
    codes = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).to(torch.int32)
    # rows: tile, sixteen, upper or lower, g; columns: stage, half, 16 columns, first or second 8, t, even or odd
    codes = codes.view(tiles, 16, 2, 8, stages, 2, 4, 2, 4, 2).permute(0, 4, 1, 5, 3, 8, 6, 2, 7, 9)
    words = torch.zeros(codes.shape[:7], dtype=torch.int32, device=packed.device)
    for place, (magnitude, sign) in enumerate(BITS):
        for odd in (0, 1):
            code = codes[..., place % 2, place // 2, odd]
            words |= ((code & 7) << (magnitude + 16 * odd)) | ((code >> 3) << (sign + 16 * odd))
    exponents = (scale.to(torch.int32) + (EXPONENT - shrink)).clamp_(min=0).to(torch.uint8)
    exponents = exponents.view(tiles, 16, 2, 8, stages, 4).permute(0, 4, 1, 3, 5, 2).contiguous()
    return torch.cat([words.view(torch.uint8).flatten(2), exponents.flatten(2)], dim=2)
