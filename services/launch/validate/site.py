"""What is validated and where: the model, the device, and meshes for as long as a step needs one."""

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.contracts.arguments import EngineArguments
from services.contracts.flags import FlagSet, Integers
from services.contracts.mesh import MeshArguments
from services.contracts.topologies import LocalTopology
from services.launch import up
from services.launch.child import ROOT
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.state import StateDir

STEPS = (1, 2, 3, 4, 5, 6)


class ValidateArguments(FlagSet):
    """k3mesh validate."""

    model: str = Field(default=str(ROOT / "models" / "demo"), description="checkpoint; the demo model if unset")
    draft_model: str = Field(default="", description="its DSpark drafter; MODEL/dspark if unset")
    step: Integers = Field(default=STEPS, description="which of the six steps; all if unset")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: an NVIDIA GPU where there is one")
    topology: LocalTopology | None = Field(default=None, description="as of `k3mesh up`; one-gpu on a GPU, else laptop")
    prefill: str = Field(default="", description="more flags of both engines' meshes, for prefill")
    decode: str = Field(default="", description="likewise, for decode")
    input_tokens: int = Field(default=256, ge=1, description="prompts of step 6")
    output_tokens: int = Field(default=48, ge=2, description="answers of steps 4 and 6")
    concurrency: Integers = Field(default=(1, 4, 16), description="levels of step 6")
    report: str = Field(default="docs/validation", description="where the report goes, as NAME.json and NAME.md")
    name: str = Field(default="", description="the report's name; the device's if unset")


@dataclass(frozen=True)
class Site:
    """One validation's surroundings."""

    arguments: ValidateArguments
    gpus: int  # that are used
    folder: Path  # for meshes' logs and for small checkpoints

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def topology(self) -> str:
        return self.arguments.topology or ("one-gpu" if self.gpus else "laptop")

    def engines(self) -> tuple[EngineArguments, EngineArguments]:
        return MeshArguments.parse(self._words("", "")).engines()

    def drafter(self) -> str:
        """Flags of both engines that switch speculation on."""
        folder = Path(self.arguments.draft_model or Path(self.arguments.model) / "dspark").resolve()
        return shlex.join(["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(folder)])

    @contextlib.contextmanager
    def mesh(self, name: str, both: str = "", decode: str = "", prefill: str = "") -> Iterator[StateDir]:
        """A mesh on free ports, with more flags of both engines or of one."""
        words = [*self._words(f"{both} {prefill}", f"{both} {decode}"), "--state-dir", str(self.folder / name)]
        with up.attached(UpArguments.parse([*words, "--port", str(free_ports(1)[0])])):
            yield StateDir(self.folder / name)

    def _words(self, prefill: str, decode: str) -> list[str]:
        a = self.arguments
        flags = {
            "model": a.model,
            "topology": self.topology,
            "prefill": f"{a.prefill} {prefill}",
            "decode": f"{a.decode} {decode}",
        }
        return [f"--{name}={value.strip()}" for name, value in flags.items()]
