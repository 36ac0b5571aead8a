"""Cache fields, their bytes and their owners: the one table that pools, barriers, sender filter and receiver read
(spec cache-and-handoff §2, §3, §7)."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from services.contracts.ids import BLOCK_TOKENS
from services.contracts.model import ModelConfig
from services.contracts.topology import Topology

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PAGED, SLOT = "paged", "slot"
ARENAS = ("mla", "kda_rec", "kda_conv", "draft")  # each rank's plain arenas, in arena-id order


@dataclass(frozen=True, slots=True)
class Field:
    """One cache field of one layer, as one rank holds it. A paged unit is a block of 128 rows, a slot unit one request."""

    field_id: str
    layer: int
    kind: str
    dtype: str
    shape: tuple[int, ...]  # of one unit
    arena: str
    parts: tuple[int, ...] = ()  # segments of the partitioned axis 0 (conv: q | k | v)

    @property
    def unit_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Geometry:
    """The cache of one rank."""

    model: ModelConfig
    topology: Topology
    cache_dtype: str  # of MLA rows and conv history; recurrent state is always float32
    draft_layers: int = 0  # MLA layers of the drafter, ids continue after the target's
    draft_row: int = 0  # elements of one of their rows; 0: as the target's

    def fields_of_stage(self, stage: int) -> tuple[Field, ...]:
        """Fields that a stage owns, in layer order; draft fields belong to the last stage."""
        fields: list[Field] = []
        for layer in self.topology.windows[stage]:
            fields += (
                [self._mla(layer, f"t.{layer}.mla", "mla", self.model.mla_row)]
                if self.model.is_mla(layer)
                else self._kda(layer)
            )
        if stage == self.topology.last_stage:
            first = self.model.num_hidden_layers
            row = self.draft_row or self.model.mla_row
            fields += [self._mla(n, f"d.{n}.mla", "draft", row) for n in range(first, first + self.draft_layers)]
        return tuple(fields)

    def producer_steps(self, stage: int) -> tuple[tuple[Field, ...], ...]:
        """The stage's fields by producer step: one step for each owned layer, then one for the drafter where there is one."""
        fields = self.fields_of_stage(stage)
        steps = [tuple(f for f in fields if f.layer == layer) for layer in self.topology.windows[stage]]
        if stage == self.topology.last_stage and self.draft_layers:
            steps.append(tuple(f for f in fields if f.arena == "draft"))
        return tuple(steps)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all paged fields of the stage that has most of them, one rank."""
        return max(self.bytes_of_stage(stage, PAGED) for stage in range(self.topology.stages))

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all slot fields of the stage that has most of them, one rank."""
        return max(self.bytes_of_stage(stage, SLOT) for stage in range(self.topology.stages))

    @property
    def state_blocks(self) -> int:
        """Blocks of host memory that a slot's bytes fill in an image."""
        return -(-self.slot_bytes // max(1, self.block_bytes))

    def bytes_of_stage(self, stage: int, kind: str) -> int:
        """Bytes of one block (PAGED) or slot (SLOT) over all its fields on this stage, one rank."""
        return sum(f.unit_bytes for f in self.fields_of_stage(stage) if f.kind == kind)

    def _mla(self, layer: int, field_id: str, arena: str, row: int) -> Field:
        return Field(field_id, layer, PAGED, self.cache_dtype, (BLOCK_TOKENS, 1, row), arena)

    def _kda(self, layer: int) -> list[Field]:
        heads = self.model.kda_num_heads // self.topology.tp_size
        dim = self.model.kda_head_dim
        channels = heads * dim
        return [
            Field(f"t.{layer}.kda_rec", layer, SLOT, "float32", (heads, dim, dim), "kda_rec"),
            Field(
                f"t.{layer}.kda_conv", layer, SLOT, self.cache_dtype,
                (3 * channels, self.model.conv_kernel_size - 1), "kda_conv", (channels,) * 3,
            ),
        ]  # fmt: skip


def verify_widths(verify_width: int) -> tuple[int, ...]:
    """The widths that a decode round may have, ascending: powers of two below the full width, and that. Few, because each is a
    shape of its own to capture; 1 is a round without speculation."""
    powers = [1 << n for n in range(verify_width.bit_length()) if 1 << n < verify_width]
    return (*powers, verify_width)


def rows_ahead(verify_width: int) -> int:
    """Positions from a request's anchor on that one decode round may write: `verify_width` rows, and behind the last that
    may be accepted the drafter's block of verify_width - 1 (spec speculation §7)."""
    return 2 * verify_width - 1


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` rows."""
    return -(-tokens // BLOCK_TOKENS)
