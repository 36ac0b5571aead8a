"""Who is where: ranks, stages, replicas, layer windows, groups and leaders of one engine (requirement; spec k3-model §11)."""

from dataclasses import dataclass
from functools import cached_property

from k3mesh.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """The shape of one engine. Global rank = (stage * dp_size + dp) * tp_size + tp; P has dp_size 1, D has stages 1."""

    role: str  # "prefill" | "decode"
    stages: int
    dp_size: int
    tp_size: int
    ep_size: int  # = dp_size * tp_size: experts are spread over one stage
    num_layers: int
    partition: tuple[int, ...]  # target layers of each stage

    @property
    def world_size(self) -> int:
        return self.stages * self.dp_size * self.tp_size

    @property
    def stage_world(self) -> int:
        return self.dp_size * self.tp_size

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """Target layers of each stage."""
        windows: list[range] = []
        start = 0
        for count in self.partition:
            windows.append(range(start, start + count))
            start += count
        return tuple(windows)

    def place_of(self, rank: int) -> "RankPlace":
        stage, inside = divmod(rank, self.stage_world)
        dp, tp = divmod(inside, self.tp_size)
        return RankPlace(rank=rank, stage=stage, dp=dp, tp=tp, window=self.windows[stage])

    def rank_of(self, stage: int, dp: int, tp: int) -> int:
        return (stage * self.dp_size + dp) * self.tp_size + tp

    def tp_group(self, rank: int) -> list[int]:
        """Ranks that share one stage's or replica's attention shards."""
        first = rank - rank % self.tp_size
        return list(range(first, first + self.tp_size))

    def ep_group(self, rank: int) -> list[int]:
        """Ranks that share one stage's experts."""
        first = rank - rank % self.stage_world
        return list(range(first, first + self.stage_world))

    @property
    def leaders(self) -> list[int]:
        """Ranks that the scheduler talks to: tensor-parallel rank 0 of each stage (P) or replica (D)."""
        return list(range(0, self.world_size, self.tp_size))

    @property
    def last_stage(self) -> int:
        return self.stages - 1


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands."""

    rank: int
    stage: int
    dp: int
    tp: int
    window: range  # target layers


def even_partition(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, the remainder to the first stages: 93 over 4 is 24, 23, 23, 23."""
    if stages < 1 or num_layers < stages:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: needs between 1 and {num_layers} stages for {num_layers} target layers",
            param="pipeline_parallel_size",
        )
    base, extra = divmod(num_layers, stages)
    return tuple(base + (1 if stage < extra else 0) for stage in range(stages))
