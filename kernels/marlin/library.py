"""Marlin's two compiled libraries, as the wheel tokenspeed-kernel brings them; tvm_ffi calls them, and the rest of that package
is not imported."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "tokenspeed_kernel"
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # the library's name for the weights' type: exponent, mantissa, signed, finite only
COLUMNS = 256  # the widest of the library's tiles, which its scratch memory must hold


@cache
def missing() -> str | None:
    """Why Marlin cannot be called here, or None."""
    if find_spec(PACKAGE) is None or not all(_path(name).exists() for name in ("marlin", "marlin_moe")):
        return "Marlin's libraries are not installed; pip install --no-deps tokenspeed-kernel==0.1.4"
    try:
        _library("marlin_moe")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Marlin's libraries do not load: {error}; pip install apache-tvm-ffi==0.1.13.post3"
    return None


def _path(name: str) -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "thirdparty", "cuda", "objs", name, f"{name}.so")


@cache
def _library(name: str) -> Any:
    import tvm_ffi  # pyright: ignore[reportMissingImports] (where Marlin is)

    return tvm_ffi.load_module(str(_path(name)))


def repack(packed: Tensor) -> Tensor:
    """One matrix, uint8 [n, k / 2] as loaded -> int32 [k / 16, 2 n], Marlin's tiles."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    out = torch.empty(columns // 16, 2 * rows, dtype=torch.int32, device=packed.device)
    no_order = torch.empty(0, dtype=torch.int32, device=packed.device)
    words = packed.contiguous().view(torch.int32).T.contiguous()
    _library("marlin").gptq_marlin_repack(out, words, no_order, columns, rows, 4)
    return out


def permute_scales(scale: Tensor) -> Tensor:
    """One matrix's, E8M0 as uint8 [n, k / 32] -> float8_e8m0fnu [k / 32, n]: among 64 rows, those 8 apart stand together, and
    of each four the inner two change places."""
    columns = scale.T.reshape(scale.shape[1], -1, 8, 8).transpose(2, 3).reshape(scale.shape[1], -1, 4)
    return columns[..., [0, 2, 1, 3]].reshape(scale.shape[1], -1).contiguous().view(torch.float8_e8m0fnu)


def align(ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ids [rows, k], -1 for none -> routes sorted by expert, each expert's filled up to whole blocks; the expert of each
    block; how many routes there are with the filling, on the device."""
    most = ids.numel() + (experts + 1) * (block - 1)
    routes = torch.empty(most, dtype=torch.int32, device=ids.device)
    owners = torch.empty(-(-most // block), dtype=torch.int32, device=ids.device)
    total = torch.empty(1, dtype=torch.int32, device=ids.device)
    sums = torch.empty(experts + 2, dtype=torch.int32, device=ids.device)  # ids go up by one: parked routes come first
    _library("marlin_moe").moe_align_block_size(ids, experts + 1, block, routes, owners, total, sums, True)
    return routes, owners, total


def multiply(
    x: Tensor, weights: Tensor, scales: Tensor, schedule: Sequence[Tensor], block: int, routes_a_row: int, out_rows: int
) -> Tensor:
    """x [rows, k] -> [out_rows, n], row r of it from x's row r // routes_a_row; only the schedule's rows are written."""
    routes, owners, total = schedule
    columns, width = weights.shape[1] * 16, scales.shape[2]
    out = torch.empty(out_rows, width, dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=x.device)  # of this call: graphs must not share them
    sums = min(width * routes.numel(), 4 * processors * block * COLUMNS) * (2 if block == 8 else 1)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    none, no_integers = torch.empty(0, dtype=x.dtype, device=x.device), torch.empty(0, dtype=torch.int32, device=x.device)
    ones = torch.empty(x.shape[0], routes_a_row, dtype=torch.float32, device=x.device)  # route weights, which it does not use
    groups = scales.shape[1]
    _library("marlin_moe").moe_wna16_marlin_gemm_bf16_ep(
        x, out, weights, none, scales, none, none, no_integers, no_integers, locks, routes, owners, total, ones, none, partial,
        block, routes_a_row, False, True, E2M1, x.shape[0], width, columns, False, False, True, False, groups,
        columns // groups, False, True, False,
    )  # fmt: skip
    return out
