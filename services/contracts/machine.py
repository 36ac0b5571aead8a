"""The flags that say what memory a rank has, for commands that count without starting anything."""

from typing import ClassVar, Literal

from pydantic import Field

from services.contracts import argument_rules as rules
from services.contracts.arguments import UTILIZATION, EngineArguments
from services.contracts.buffers import GIB
from services.contracts.capacity import GPUS
from services.contracts.flags import FlagSet

DEFAULT_GPU = "h200"


class MachineArguments(FlagSet):
    """Flags of `k3mesh plan` and `k3mesh sim`."""

    aliases: ClassVar[dict[str, str]] = {**EngineArguments.aliases, "json": "as_json"}

    gpu: Literal["h100", "h200"] = Field(default=DEFAULT_GPU, description="for engines with GPU backends; others use the host")
    memory_gib: float = Field(default=0, ge=0, description="memory of one GPU, GiB, instead of the named one's")
    memory_utilization: float = Field(
        default=0, ge=0, le=1, description="share of it that a rank may take, instead of the engines' --gpu-memory-utilization"
    )
    as_json: bool = Field(default=False, description="figures as JSON")

    def memory_of(self, engine: EngineArguments) -> int | None:
        """Bytes that one rank of the engine may take of its GPU; None: it runs on a host."""
        if not rules.wants_gpu(engine):
            return None
        share = self.memory_utilization or engine.gpu_memory_utilization
        return int(self.memory_gib * GIB * share) if self.memory_gib else gpu_memory(self.gpu, share)


def gpu_memory(name: str = DEFAULT_GPU, utilization: float = UTILIZATION) -> int:
    """Bytes that one rank may take of such a GPU."""
    return int(GPUS[name] * utilization)
