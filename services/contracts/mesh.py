"""What names a mesh: a topology, a model, and flags that change either engine."""

import shlex
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.contracts import argument_rules as rules
from services.contracts.arguments import EngineArguments
from services.contracts.flags import FlagSet
from services.contracts.topologies import TOPOLOGIES, TopologyName


class MeshArguments(FlagSet):
    """The flags that `k3mesh up`, `check`, `plan` and `sim` share."""

    topology: TopologyName = Field(default="laptop", description="named argument sets of both engines")
    model: str = Field(description="directory of the checkpoint (config.json and safetensors)")
    prefill: str = Field(default="", description='more flags of the prefill engine: --prefill="--max-num-seqs 8"')
    decode: str = Field(default="", description="more flags of the decode engine, likewise")

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        self.fill({"model": str(Path(self.model).resolve())})
        return self

    def engines(self) -> tuple[EngineArguments, EngineArguments]:
        """Arguments of the prefill and of the decode engine, checked by themselves and with each other."""
        own = TOPOLOGIES[self.topology].engines(self.model)
        prefill, decode = (
            EngineArguments.parse([*flags, *shlex.split(more)])
            for flags, more in zip(own, (self.prefill, self.decode), strict=True)
        )
        rules.check_pair(prefill, decode)
        return prefill, decode
