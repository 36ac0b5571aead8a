"""Step 1: each routed experts' backend against dequantised weights in float32, then the dispatcher over ranks.

On a GPU at K3's own widths: 28 experts of 3584 x 3072, as a decode rank has them, and 16 routes a row. Batches are empty, of
one row, of many, skewed to one expert, and padded.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch

from kernels.ops import Experts
from kernels.reference.experts import prepare_experts as prepare_reference
from kernels.registry import CANDIDATES, REFERENCE
from services.launch.bench.kernel_cases import K3_RANK
from services.launch.child import ROOT
from services.launch.validate.drawn import random_experts, relative_error
from services.launch.validate.report import Check, Found, check, not_run
from services.launch.validate.site import Site

EXPERTS, ROUTES = 28, 16
BATCHES = {"none": 0, "one row": 1, "7 rows": 7, "512 rows": 512, "skewed to one expert": 128, "every other row padded": 64}
LIMIT = 1e-2  # of the result's norm: bfloat16 between the two products
SMOKE_S = 120


def run(site: Site) -> Found:
    checks = _backends() if site.gpus else [not_run("experts' backends at K3's widths", "they need a GPU")]
    for mode in ("normal", "low_latency"):
        checks.append(_smoke(mode, ranks=max(2, min(8, site.gpus))))
    if site.gpus < 2:
        checks.append(not_run("DeepEP over NVLink, EP8 normal and EP32 low latency", f"{site.gpus} GPUs are here"))
    return checks, {}


def _backends() -> list[Check]:
    device = torch.device("cuda")
    drawn = torch.Generator(device).manual_seed(2)
    packed = random_experts(EXPERTS, K3_RANK.moe_latent, K3_RANK.moe_inner, device)
    reference = prepare_reference(*packed, 4.0, 25.0, torch.float32)
    checks: list[Check] = []
    for candidate in CANDIDATES["prepare_experts"]:
        if candidate.backend == REFERENCE:
            continue
        reason = candidate.supports(device, replace(K3_RANK, num_experts=EXPERTS, local_experts=EXPERTS))
        if reason is not None:
            checks.append(not_run(f"experts by {candidate.backend}", reason))
            continue
        experts = candidate.implementation(*(it.clone() for it in packed), 4.0, 25.0, torch.bfloat16)
        checks += [_compare(candidate.backend, name, rows, experts, reference, drawn) for name, rows in BATCHES.items()]
    return checks or [not_run("experts' backends at K3's widths", "this version has the reference alone")]


def _compare(backend: str, name: str, rows: int, experts: Experts, reference: Experts, drawn: torch.Generator) -> Check:
    """Both layouts."""
    device, latent = drawn.device, K3_RANK.moe_latent
    x = torch.randn(rows, latent, generator=drawn, device=device).bfloat16()
    ids = torch.rand(rows, EXPERTS, generator=drawn, device=device).argsort(-1)[:, :ROUTES].contiguous()
    weights = torch.rand(rows, ROUTES, generator=drawn, device=device)
    if name.startswith("skewed"):
        ids[:, 0], ids[:, 1:], weights[:, 1:] = 5, -1, 0.0
    if name.startswith("every other"):
        ids[1::2], weights[1::2] = -1, 0.0
    routed = relative_error(experts.routed(x, ids, weights), reference.routed(x.float(), ids, weights))
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=EXPERTS).clamp(max=max(1, rows)).int()
    grid = torch.full((EXPERTS, max(1, rows), latent), float("nan"), device=device, dtype=torch.bfloat16)
    valid = torch.arange(grid.shape[1], device=device) < counts[:, None]
    grid[valid] = torch.randn(int(valid.sum()), latent, generator=drawn, device=device).bfloat16()
    grouped = relative_error(experts.grouped(grid, counts)[valid], reference.grouped(grid.float(), counts)[valid])
    figure = f"relative error {routed:.1e} routed, {grouped:.1e} grouped"
    return check(f"experts by {backend}, {name}", figure, max(routed, grouped) <= LIMIT, f"at most {LIMIT:g}")


def _smoke(mode: str, ranks: int) -> Check:
    """The dispatcher over so many processes of this machine, by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "services.launch.validate.ep_smoke"]
    compared = f"dispatch over {ranks} ranks, {mode}"
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "TEST_DEEPEP_MODE": mode, "OMP_NUM_THREADS": "1"}, text=True,
            capture_output=True, timeout=SMOKE_S,
        )  # fmt: skip
        told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    except (subprocess.TimeoutExpired, StopIteration, ValueError) as error:
        return check(compared, f"the ranks did not end well ({error!r})", passed=False)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in told["errors"].items())
    return check(
        compared, f"relative errors: {errors} ({told['by']}, {told['device']})", told["passed"], f"at most {told['limit']:g}"
    )
