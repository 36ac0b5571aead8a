"""A checkpoint's tensors as a GPU draws them: the laws of checkpoint_tensors, other values, a hundred times as fast."""

import hashlib
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from k3mesh.errors import ConfigError
from services.launch.checkpoint_tensors import E8M0_BIAS, QUIET, TensorSpec

BLOCK_VALUES = 1 << 28  # drawn at once
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def blocks(spec: TensorSpec, seed: int) -> Iterator[bytes]:
    """The tensor's bytes, row-major, little-endian, some rows at a time. ConfigError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no NVIDIA GPU; leave it out", param="device")
    key = int.from_bytes(hashlib.sha256(f"{seed}/{spec.key or spec.name}".encode()).digest()[:7], "little")
    generator = torch.Generator("cuda").manual_seed(key)
    rows, width = spec.shape[0], prod(spec.shape[1:])
    step = max(1, BLOCK_VALUES // width)
    for first in range(0, rows, step):
        drawn = _rows(spec, generator, first, min(step, rows - first), width)
        yield drawn.to(DTYPES[spec.dtype]).cpu().view(torch.uint8).numpy().tobytes()


def _rows(spec: TensorSpec, generator: torch.Generator, first: int, rows: int, width: int) -> Tensor:
    if spec.dtype == "U8":
        most = 2 if spec.exponent is not None else 256
        bits = torch.randint(most, (rows, width), generator=generator, device="cuda", dtype=torch.int16)
        return bits if spec.exponent is None else E8M0_BIAS + spec.exponent - bits
    values = torch.randn((rows, width), generator=generator, device="cuda") * spec.std + spec.mean
    if spec.drawn is not None:
        values[max(0, spec.drawn - first) :] = 0
    quiet = [row - first for row in spec.quiet_rows if first <= row < first + rows]
    values[quiet] *= QUIET
    return values
