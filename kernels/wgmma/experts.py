"""Routed MXFP4 experts by Hopper's own matrix instructions (products.cu); bfloat16 rows, both layouts of spec moe-ep §3, §4.

Nothing waits for the host: how many rows each expert has is known to the device alone, so calls can be captured.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import nvrtc
from kernels.wgmma import layout

WARPS = 8  # of a block that moves rows


@dataclass(frozen=True, slots=True)
class Shape:
    """How multiply_experts is built."""

    groups: int  # warpgroups that multiply
    registers: tuple[int, int]  # of a thread that loads, and of one that multiplies
    paths: tuple[tuple[int, ...], ...]  # rows of each wgmma; a tile takes the first path that holds its rows
    stages: int  # of shared memory

    @property
    def rows(self) -> int:
        """Of one expert in one tile, at most."""
        return max(map(sum, self.paths))

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows * layout.DEPTH * 2 + layout.STAGE_BYTES + 16)


# Few rows an expert, as decode rounds have: weights stream past, four warpgroups hide what the others wait for.
FEW = Shape(groups=4, registers=(32, 112), paths=((8,), (16,), (24,), (32,), (72,)), stages=6)
# Many, as prompt chunks have: an expert's rows should fill one tile, so that its weights become bfloat16 once.
MANY = Shape(groups=2, registers=(40, 232), paths=((88, 72),), stages=3)


def prepare_experts(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, beta: float, linear_beta: float, dtype: torch.dtype
) -> "WgmmaExperts":
    del dtype  # bfloat16, as `supports` says
    first = _Weights(w13, w13_scale, layout.first_rows(w13.shape[1] // 2))
    second = _Weights(w2, w2_scale, layout.second_rows(w2.shape[1]))
    return WgmmaExperts(first, second, beta, linear_beta)


class _Weights:
    """One product's, of all experts."""

    def __init__(self, packed: Tensor, scale: Tensor, rows: Tensor):
        shrink = layout.excess(scale)
        self.gain = 2.0**shrink
        self.tiles, self.stages = packed.shape[1] // layout.TILE, packed.shape[2] * 2 // layout.DEPTH
        shape = (packed.shape[0], self.tiles, self.stages, layout.STAGE_BYTES)
        self.pieces = torch.empty(shape, dtype=torch.uint8, device=packed.device)
        for expert, pieces in enumerate(self.pieces):
            pieces.copy_(layout.arrange(packed[expert], scale[expert], rows, shrink))


class _Product(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_uint64),
        ("image", ctypes.c_uint64),
        ("tiles", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("gain", ctypes.c_float),
    )


class _Work(ctypes.Structure):
    _fields_ = (
        ("first", _Product),
        ("second", _Product),
        ("tiles", ctypes.c_uint64),
        ("num_tiles", ctypes.c_uint64),
        ("ready", ctypes.c_uint64),
        ("inner", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("beta", ctypes.c_float),
        ("linear_beta", ctypes.c_float),
        ("four", ctypes.c_uint32),
        ("eight", ctypes.c_uint32),
    )


class _Scratch:
    """What the kernels of one call tell each other, for at most `rows` rows over all experts."""

    def __init__(self, shape: Shape, rows: int, experts: int, latent: int, inner: int, device: torch.device):
        self.most_tiles = min(rows, experts) + rows // shape.rows
        self.most_rows = rows + 8 * self.most_tiles  # tiles of an expert are equally large, in eights
        integers = torch.empty(5 * self.most_tiles + 1, dtype=torch.int32, device=device)
        self.tiles, self.ready, self.num_tiles = integers.split([4 * self.most_tiles, self.most_tiles, 1])
        self.image = torch.empty(self.most_rows, latent, dtype=torch.bfloat16, device=device)
        self.inner = torch.empty(self.most_rows, inner, dtype=torch.bfloat16, device=device)

    def schedule(self) -> tuple[int | Tensor, ...]:
        return self.most_tiles, self.most_rows, self.tiles, self.num_tiles, self.ready


class WgmmaExperts:
    def __init__(self, first: _Weights, second: _Weights, beta: float, linear_beta: float):
        self.num_local = first.pieces.shape[0]
        self._first, self._second = first, second
        self._latent, self._inner = second.tiles * layout.TILE, first.tiles * layout.TILE // 2
        self._beta, self._linear_beta = beta, linear_beta
        device = first.pieces.device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels = {shape: nvrtc.compiled(source(shape), device) for shape in (FEW, MANY)}

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, k = ids.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not rows:
            return out
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        most = rows * min(k, self.num_local)
        shape = FEW if most <= 2 * FEW.rows * self.num_local else MANY
        kernels, scratch = self._kernels[shape], self._scratch(shape, most, x.device)
        counts = torch.zeros(self.num_local, dtype=torch.int32, device=x.device)
        slots = torch.empty(ids.shape, dtype=torch.int32, device=x.device)
        y = torch.empty(scratch.most_rows, self._latent, dtype=x.dtype, device=x.device)
        chunks, blocks = self._latent // 8, math.ceil(rows / WARPS)
        kernels.launch("count_routes", math.ceil(ids.numel() / 256), 256, 0, ids, ids.numel(), counts, slots)
        kernels.launch(
            "pack_routed", min(blocks, 8 * self._processors), 32 * WARPS, 8 * (self.num_local + 1),
            x, ids, rows, k, counts, self.num_local, chunks, *scratch.schedule(), slots, scratch.image,
        )  # fmt: skip
        self._multiply(shape, scratch, y)
        kernels.launch("combine_routes", blocks, 32 * WARPS, 0, y, slots, weights, rows, k, chunks, out)
        return out

    def grouped(self, x: Tensor, counts: Tensor, most: int | None = None) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.numel():
            return out
        x, counts = x.contiguous(), counts.contiguous()
        rows = x.shape[0] * x.shape[1] if most is None else min(most, x.shape[0] * x.shape[1])
        scratch = self._scratch(FEW, rows, x.device)
        blocks = max(1, min(math.ceil(scratch.most_rows / WARPS), 8 * self._processors))
        self._kernels[FEW].launch(
            "pack_grouped", blocks, 32 * WARPS, 8 * (self.num_local + 1),
            x, counts, self.num_local, x.shape[1], self._latent // 8, *scratch.schedule(), scratch.image,
        )  # fmt: skip
        self._multiply(FEW, scratch, out)
        return out

    def _scratch(self, shape: Shape, rows: int, device: torch.device) -> _Scratch:
        return _Scratch(shape, rows, self.num_local, self._latent, self._inner, device)

    def _multiply(self, shape: Shape, scratch: _Scratch, out: Tensor) -> None:
        first, second = (
            _Product(weights.pieces.data_ptr(), image.data_ptr(), weights.tiles, weights.stages, weights.gain)
            for weights, image in ((self._first, scratch.image), (self._second, scratch.inner))
        )
        work = _Work(
            first, second, scratch.tiles.data_ptr(), scratch.num_tiles.data_ptr(), scratch.ready.data_ptr(),
            scratch.inner.data_ptr(), out.data_ptr(), self._beta, self._linear_beta, 4, 8,
        )  # fmt: skip
        self._kernels[shape].launch("multiply_experts", self._processors, shape.threads, shape.shared_bytes, work)


@cache
def source(shape: Shape) -> str:
    """Constants, the matrix instructions of the shape's widths, and the files that use them."""
    few, many = shape.registers
    paths = " ".join(f"run({sum(path)}, {', '.join(map(str, path))})" for path in shape.paths)
    constants = (
        f"#define FOR_EACH_PATH(run) {paths}\n"
        f"constexpr int GROUPS = {shape.groups}, LOAD_REGISTERS = {few}, MULTIPLY_REGISTERS = {many};\n"
        f"constexpr int STAGES = {shape.stages}, ROWS = {shape.rows};\n"
    )
    declaration = "template <int WIDTH> __device__ void wgmma(float* d, const unsigned* a, unsigned long long b);\n"
    instructions = "".join(_wgmma(width) for width in sorted({width for path in shape.paths for width in path}))
    files = (Path(__file__).with_name(name).read_text() for name in ("hopper.cu", "rows.cu", "products.cu"))
    return "".join((constants, declaration, instructions, *files))


def _wgmma(width: int) -> str:
    """d += a * b: a, 64 rows by 16 columns, in registers; b, `width` rows by 16 columns, in shared memory by its descriptor."""
    sums = width // 2
    d = ", ".join(f"%{n}" for n in range(sums))
    a = ", ".join(f"%{sums + n}" for n in range(4))
    in_out = ", ".join(f'"+f"(d[{n}])' for n in range(sums))
    inputs = ", ".join(f'"r"(a[{n}])' for n in range(4))
    return (
        f"template <> __device__ __forceinline__ void wgmma<{width}>(float* d, const unsigned* a, unsigned long long b) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "\n'
        f'                 "{{{d}}}, {{{a}}}, %{sums + 4}, 1, 1, 1, 0;" : {in_out} : {inputs}, "l"(b));\n}}\n'
    )
