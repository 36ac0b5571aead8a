"""Chooses an implementation of each op, once, at start.

`CANDIDATES` lists each op's backends in the order of preference; each answers `supports(device, geometry)` with None or
with the reason why not. "auto" takes the first that supports the geometry and ends at "reference", which supports all. A
backend that is asked for by name and cannot serve raises: there is no silent fallback.

A backend's package need not be installed: its implementations are imported when they are chosen, after `supports`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from kernels import cuda_kda, flash_kda, flash_mla, marlin, triton_ops, wgmma
from kernels.ops import OpGeometry, Ops

AUTO, REFERENCE = "auto", "reference"

Implementation = Callable[..., Any]
Supports = Callable[[torch.device, OpGeometry], str | None]


class BackendUnusable(ValueError):
    """The backend that was asked for cannot serve this op here."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's implementation of one op."""

    backend: str
    load: Callable[[], Implementation]  # imports it
    supports: Supports

    @property
    def implementation(self) -> Implementation:
        """Where `supports` had no reason against it."""
        return self.load()


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one op, and why the candidates before it were not."""

    op: str
    backend: str
    implementation: Implementation
    refused: tuple[tuple[str, str], ...]  # (backend, reason)


def _always(device: torch.device, geometry: OpGeometry) -> str | None:
    return None


def _backend(name: str, supports: Supports, module: str, function: str) -> Candidate:
    return Candidate(name, lambda: getattr(import_module(f"kernels.{module}"), function), supports)


def _flash_mla(function: str) -> Candidate:
    return _backend("flashmla", flash_mla.supports, "flash_mla.attention", function)


def _cuda_kda(function: str) -> Candidate:
    return _backend("cuda", cuda_kda.supports, "cuda_kda.window", function)


def _triton(module: str, function: str, supports: Supports = triton_ops.supports_rows) -> Candidate:
    return _backend("triton", supports, f"triton_ops.{module}", function)


def _reference(module: str, function: str) -> Candidate:
    return _backend(REFERENCE, _always, f"reference.{module}", function)


_FLASH_KDA = _backend("flashkda", flash_kda.supports, "flash_kda.scan", "kda_scan")
_TRITON_SCAN = _triton("kda_scan", "kda_scan", triton_ops.supports_kda)
_TRITON_ATTENTION = _triton("mla", "mla_attention", triton_ops.supports_mla)

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "rms_norm": (_triton("norms", "rms_norm"), _reference("norms", "rms_norm")),
    "attn_res_mix": (_triton("norms", "attn_res_mix"), _reference("norms", "attn_res_mix")),
    "situ_mul": (_triton("activation", "situ_mul"), _reference("activation", "situ_mul")),
    "mla_write": (_triton("mla_write", "mla_write"), _reference("mla", "mla_write")),
    "mla_extend": (_flash_mla("mla_extend"), _TRITON_ATTENTION, _reference("mla", "mla_attention")),
    "mla_decode": (_flash_mla("mla_decode"), _TRITON_ATTENTION, _reference("mla", "mla_attention")),
    "mla_block": (
        _flash_mla("mla_block"),
        _triton("mla", "mla_block", triton_ops.supports_mla),
        _reference("mla", "mla_block"),
    ),
    "short_conv": (_triton("short_conv", "short_conv", triton_ops.supports_kda), _reference("kda", "short_conv")),
    "short_conv_verify": (
        _triton("short_conv", "short_conv_verify", triton_ops.supports_kda),
        _reference("kda", "short_conv_verify"),
    ),
    "kda_extend": (_FLASH_KDA, _TRITON_SCAN, _reference("kda", "kda_scan")),
    "kda_decode": (_TRITON_SCAN, _reference("kda", "kda_scan")),
    "kda_verify": (
        _cuda_kda("kda_verify"),
        _triton("kda_verify", "kda_verify", triton_ops.supports_kda),
        _reference("kda", "kda_verify"),
    ),
    "kda_commit": (
        _cuda_kda("kda_commit"),
        _triton("kda_commit", "kda_commit", triton_ops.supports_kda),
        _reference("kda", "kda_commit"),
    ),
    "kda_output": (_triton("kda_output", "kda_output", triton_ops.supports_kda), _reference("kda", "kda_output")),
    "router": (_triton("router", "router"), _reference("router", "router")),
    "prepare_experts": (
        _backend("wgmma", wgmma.supports, "wgmma.experts", "prepare_experts"),
        _backend("marlin", marlin.supports, "marlin.experts", "prepare_experts"),
        _reference("experts", "prepare_experts"),
    ),
}


def resolve(
    op: str,
    device: torch.device,
    geometry: OpGeometry,
    wanted: str = AUTO,
    candidates: Mapping[str, tuple[Candidate, ...]] = CANDIDATES,
) -> Choice:
    """The first candidate for `op` that supports the geometry, or the one that is `wanted`; BackendUnusable otherwise."""
    known = candidates[op]
    if wanted != AUTO and wanted not in {candidate.backend for candidate in known}:
        names = ", ".join(candidate.backend for candidate in known)
        raise BackendUnusable(f"backend {wanted!r} does not implement {op}; choose {AUTO!r} or one of: {names}")
    refused: list[tuple[str, str]] = []
    for candidate in known:
        if wanted not in (AUTO, candidate.backend):
            refused.append((candidate.backend, f"{wanted} was asked for"))
            continue
        reason = candidate.supports(device, geometry)
        if reason is None:
            return Choice(op, candidate.backend, candidate.implementation, tuple(refused))
        if wanted != AUTO:
            raise BackendUnusable(f"backend {wanted!r} cannot serve {op} on {device}: {reason}")
        refused.append((candidate.backend, reason))
    raise BackendUnusable(f"no backend serves {op} on {device}: " + "; ".join(f"{name}: {why}" for name, why in refused))


def bundle(choices: Iterable[Choice]) -> Ops:
    """The chosen implementations under their op's names."""
    return Ops(**{choice.op: choice.implementation for choice in choices})


def format_table(choices: Iterable[Choice]) -> str:
    """One line an op: what was chosen, and why others were refused."""
    lines: list[str] = []
    for choice in choices:
        refused = "; ".join(f"{backend}: {reason}" for backend, reason in choice.refused)
        lines.append(f"{choice.op:<16} {choice.backend:<12} {refused}".rstrip())
    return "\n".join(lines)
