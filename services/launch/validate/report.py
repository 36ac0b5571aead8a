"""What a validation found, as JSON and as Markdown: each check with what was compared, its figure and its limit."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("torch", "triton", "flash_mla", "flash_kda", "tokenspeed-flashmla", "tokenspeed-flashkda", "tokenspeed-deepep",
            "tokenspeed-kernel", "ucxx-cu12", "ucxx-cu13", "grpcio", "numpy")  # fmt: skip
Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    compared: str
    figure: str
    verdict: Verdict
    limit: str = ""


def check(compared: str, figure: str, passed: bool, limit: str = "") -> Check:
    return Check(compared, figure, "passed" if passed else "failed", limit)


def not_run(compared: str, why: str) -> Check:
    return Check(compared, why, "not run")


Found = tuple[list[Check], dict[str, Any]]  # checks, and figures that are none


@dataclass(frozen=True, slots=True)
class Step:
    """One of the six."""

    number: int
    title: str
    checks: Sequence[Check]
    seconds: float
    data: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """Failed if one failed; not run if none was."""
        verdicts = {it.verdict for it in self.checks}
        return "failed" if "failed" in verdicts else "passed" if "passed" in verdicts else "not run"


def environment(device: str) -> dict[str, str]:
    """Exact versions of what ran."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(folder: Path, name: str, arguments: Sequence[str], steps: Sequence[Step], versions: dict[str, str]) -> Path:
    """NAME.json and NAME.md in the folder -> the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "arguments": list(arguments),
        "environment": versions,
        "steps": [asdict(step) | {"verdict": step.verdict} for step in steps],
    }
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text("\n".join(_markdown(arguments, steps, versions)) + "\n")
    return path


def lines(step: Step) -> list[str]:
    """For a terminal."""
    head = f"step {step.number}, {step.title}: {step.verdict} ({step.seconds:.0f} s)"
    return [
        head,
        *(f"  {it.verdict:<8} {it.compared}: {it.figure}" + (f" ({it.limit})" if it.limit else "") for it in step.checks),
    ]


def _markdown(arguments: Sequence[str], steps: Sequence[Step], versions: dict[str, str]) -> list[str]:
    out = ["# Validation", "", f"`k3mesh validate {' '.join(arguments)}`", "", "| | |", "|---|---|"]
    out += [f"| {name} | {value} |" for name, value in versions.items()]
    for step in steps:
        out += [
            "",
            f"## {step.number}. {step.title}: {step.verdict}",
            "",
            "| compared | figure | limit | |",
            "|---|---|---|---|",
        ]
        out += [f"| {it.compared} | {it.figure} | {it.limit} | {it.verdict} |" for it in step.checks]
        if step.data:
            out += ["", "```json", json.dumps(step.data, indent=1), "```"]
    return out
