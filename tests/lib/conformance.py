"""What the conformance tests of all ops share: the backends, the tolerances, and inputs."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.ops import OpGeometry
from kernels.registry import CANDIDATES, Candidate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Error norm over result norm, against the float64 definition of the same inputs. A change here is a decision.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
DTYPES = tuple(TOLERANCE)

# Rows of each sequence.
RAGGED = {
    "empty": [],
    "one row": [1],
    "decode": [1, 1, 1, 1, 1],
    "verify": [8, 8, 8],
    "ragged": [3, 1, 0, 17, 130],
}


def each_mode(name: str):
    """Parametrises `op`, `backend` and `lengths` over an op's two forms: a decode round has equally many rows a sequence."""
    cases = [
        pytest.param(f"{name}_{mode}", backend, lengths, id=f"{mode}-{backend.backend}-{case}")
        for mode in ("extend", "decode")
        for backend in CANDIDATES[f"{name}_{mode}"]
        for case, lengths in RAGGED.items()
        if mode == "extend" or len(set(lengths)) < 2
    ]
    return pytest.mark.parametrize(("op", "backend", "lengths"), cases)


def each_backend(op: str):
    """Parametrises `backend` over the candidates for `op`."""
    return pytest.mark.parametrize("backend", CANDIDATES[op], ids=lambda candidate: candidate.backend)


def each(**axes: dict | tuple):
    """One parametrize mark for each axis; a dictionary gives its keys as ids."""

    def decorate(test):
        for name, values in axes.items():
            ids = list(values) if isinstance(values, dict) else [str(value).removeprefix("torch.") for value in values]
            test = pytest.mark.parametrize(name, list(values.values() if isinstance(values, dict) else values), ids=ids)(test)
        return test

    return decorate


def implementation(backend: Candidate, geometry: OpGeometry):
    """The backend's function, or skip with its reason."""
    reason = backend.supports(DEVICE, geometry)
    if reason is not None:
        pytest.skip(f"{backend.backend}: {reason}")
    return backend.implementation


def geometry(dtype: torch.dtype = torch.float32, **changes: int) -> OpGeometry:
    """K3's at TP8 and EP32, save for `changes`."""
    full = {
        "hidden": 7168,
        "mla_heads": 12,
        "mla_latent": 512,
        "mla_shared": 64,
        "kda_heads": 12,
        "kda_head_dim": 128,
        "conv_width": 4,
        "num_experts": 896,
        "local_experts": 28,
        "top_k": 16,
        "moe_latent": 3584,
        "moe_inner": 3072,
    }
    return OpGeometry(dtype=dtype, cache_dtype=dtype, **(full | changes))


class Data:
    """Seeded inputs; strided ones are views of wider tensors whose other columns are NaN."""

    def __init__(self, seed: int = 0, strided: bool = False):
        self._generator = torch.Generator().manual_seed(seed)
        self._strided = strided

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        values = (torch.randn(shape, generator=self._generator) * scale).to(dtype=dtype, device=DEVICE)
        if not self._strided:
            return values
        wide = torch.full((*shape[:-1], shape[-1] + 8), float("nan"), dtype=dtype, device=DEVICE)
        wide[..., : shape[-1]] = values
        return wide[..., : shape[-1]]

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=torch.uint8).to(DEVICE)


def bounds_of(lengths: list[int]) -> Tensor:
    """cu_seqlens [B+1] int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def assert_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Shapes equal, everything finite, and the error within the table."""
    assert actual.shape == wanted.shape
    assert actual.isfinite().all()
    if wanted.numel():
        error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < TOLERANCE[dtype], f"relative error {error:.2e} exceeds {TOLERANCE[dtype]:.0e}"


def paged(rows: list[Tensor], width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A cache with each sequence's rows in scattered blocks, NaN wherever nobody wrote -> cache, block tables."""
    counts = [-(-len(part) // 128) for part in rows]
    total = 1 + sum(counts)
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(9)).add(1).tolist()
    cache = torch.full((total, 128, 1, width), float("nan"), dtype=dtype, device=DEVICE)
    cache[0] = 0
    tables = torch.zeros(len(rows), max(counts, default=0) + 2, dtype=torch.int32, device=DEVICE)
    for sequence, part in enumerate(rows):
        for number in range(counts[sequence]):
            block = order.pop()
            tables[sequence, number] = block
            piece = part[number * 128 : (number + 1) * 128]
            cache[block, : len(piece), 0] = piece
    return cache, tables
