"""The checksum of frames on a GPU, as its definition in services/kvtransfer/units.cu says it, by numpy."""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def position_sum(data: bytes) -> int:
    """Of `data` in little-endian words of 64 bits, zeros behind its end: each times its position's odd weight, modulo 2^64."""
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    mixed = np.arange(1, len(words) + 1, dtype=np.uint64) * GOLDEN
    weights = (mixed ^ (mixed >> np.uint64(32))) | np.uint64(1)
    return int((words * weights).sum(dtype=np.uint64))
