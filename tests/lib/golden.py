"""The golden checkpoints, and an engine in one process: every rank of a topology as a thread, one sequence after another."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.contracts.geometry import Geometry, blocks_for
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.model import ModelConfig, parse_model_config
from services.contracts.topology import Topology, even_partition
from services.worker.model.backends import choose_ops
from services.worker.model.batch import ForwardBatch, Hop, LayerCaches, LocalExperts, Mode
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"
TINY, FIXED_ROUTING = "k3-tiny", "k3-tiny-fixed-routing"
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"golden checkpoints are not at {GOLDEN}")


@cache
def golden_model(name: str) -> ModelConfig:
    path = GOLDEN / name / "config.json"
    return parse_model_config(json.loads(path.read_text()), str(path))


@cache
def golden_values(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as values:
        return dict(values)


@cache
def prompts(name: str) -> tuple[list[int], ...]:
    values = golden_values(name)
    return tuple(values[f"ids_{n}"].tolist() for n in range(len(values["lengths"])))


def expected(name: str, what: str, prompt: int) -> Tensor:
    return torch.from_numpy(golden_values(name)[f"{what}_{prompt}"])


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def topology_of(model: ModelConfig, *, stages: int = 1, tp: int = 1, dp: int = 1, partition: tuple[int, ...] = ()) -> Topology:
    return Topology(
        role="prefill" if dp == 1 else "decode",
        stages=len(partition) or stages,
        dp_size=dp,
        tp_size=tp,
        ep_size=dp * tp,
        num_layers=model.num_hidden_layers,
        partition=partition or even_partition(model.num_hidden_layers, stages),
    )


class ThreadGroup:
    """`size` threads that exchange one tensor each."""

    def __init__(self, size: int):
        self.size = size
        self._slots: list[object] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, value: object) -> list:
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class ThreadTensorParallel:
    """services.worker.model.batch.TensorParallel over threads."""

    rank: int
    size: int
    group: ThreadGroup

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.group.exchange(self.rank, x)
        return sum(parts[1:], parts[0])

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.group.exchange(self.rank, x))


@dataclass
class ThreadDispatcher:
    """services.worker.model.batch.ExpertDispatcher over threads: each rank sees all rows and answers for its experts.

    Decode uses the grouped layout, its rows beyond the counts poisoned with NaN.
    """

    rank: int
    group: ThreadGroup
    calls: list[tuple[Tensor, Tensor]]  # global ids and weights of every call

    def forward(
        self,
        mode: Mode,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: LocalExperts,
        overlap: Callable[[], None] | None = None,
    ) -> Tensor:
        self.calls.append((ids, weights))
        shared = self.group.exchange(self.rank, (z, ids, weights))
        all_z, all_ids, all_weights = (torch.cat(parts) for parts in zip(*shared, strict=True))
        local = all_ids - self.rank * experts.num_local
        owned = (all_ids >= 0) & (local >= 0) & (local < experts.num_local)
        local, owned_weights = torch.where(owned, local, -1), torch.where(owned, all_weights, 0.0)
        if overlap:
            overlap()
        compute = experts.routed if mode == "extend" else _grouped(experts)
        partials = self.group.exchange(self.rank, compute(all_z, local, owned_weights).float())
        first = sum(part[0].shape[0] for part in shared[: self.rank])
        return sum(partials[1:], partials[0])[first : first + z.shape[0]].to(z.dtype)


def _grouped(experts: LocalExperts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The low-latency layout's dispatch and combine around the experts."""

    def compute(z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = torch.full((experts.num_local, max(1, z.shape[0]), z.shape[1]), float("nan"), dtype=z.dtype)
        counts = torch.zeros(experts.num_local, dtype=torch.int32)
        places: list[tuple[int, int, int, int]] = []
        for row, route in (ids >= 0).nonzero().tolist():
            expert = int(ids[row, route])
            places.append((row, route, expert, int(counts[expert])))
            x[expert, counts[expert]] = z[row]
            counts[expert] += 1
        y = experts.grouped(x, counts)
        out = torch.zeros(z.shape, dtype=torch.float32)
        for row, route, expert, place in places:
            out[row] += weights[row, route] * y[expert, place].float()
        return out.to(z.dtype)

    return compute


def make_caches(geometry: Geometry, stage: int, num_blocks: int, num_slots: int) -> LayerCaches:
    """A stage's pools, filled with NaN save for the null block and slot: whoever reads what nobody wrote, shows it."""
    caches = LayerCaches(mla={}, kda_rec={}, kda_conv={})
    for field in geometry.fields_of_stage(stage):
        units = num_blocks if field.kind == "paged" else num_slots
        pool = torch.full((units, *field.shape), float("nan"), dtype=getattr(torch, field.dtype))
        pool[0] = 0
        getattr(caches, field.arena)[field.layer] = pool
    return caches


@dataclass
class Request:
    """One request's place in the caches."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    done: int = 0


class Engine:
    """All ranks of one engine. `step` runs the next rows of some sequences through every stage."""

    def __init__(self, name: str, topology: Topology, dtype: torch.dtype, num_blocks: int = 8, num_slots: int = 8):
        self.model, self.topology, self.dtype = golden_model(name), topology, dtype
        geometry = Geometry(self.model, topology, NAMES[dtype])
        ops, _ = choose_ops(self.model, topology, "cpu", dtype, dtype)
        stage_groups = [ThreadGroup(topology.stage_world) for _ in range(topology.stages)]
        tp_groups = [ThreadGroup(topology.tp_size) for _ in topology.leaders]
        self._groups = stage_groups + tp_groups
        self.caches: list[LayerCaches] = []
        self.dispatchers: list[ThreadDispatcher] = []
        self.stages: list[DecoderStage] = []
        for rank in range(topology.world_size):
            place = topology.place_of(rank)
            tp_group = tp_groups[rank // topology.tp_size]
            self.caches.append(make_caches(geometry, place.stage, num_blocks, num_slots))
            self.dispatchers.append(ThreadDispatcher(rank % topology.stage_world, stage_groups[place.stage], []))
            self.stages.append(
                DecoderStage(
                    self.model,
                    topology,
                    place,
                    load_stage_weights(GOLDEN / name, self.model, topology, place, dtype),
                    self.caches[rank],
                    ThreadTensorParallel(place.tp, topology.tp_size, tp_group),
                    self.dispatchers[rank],
                    ops,
                )
            )
        self.steps: list[list[int]] = [[] for _ in self.stages]  # producer steps that each rank announced
        self.hops: list[Hop] = []  # of tensor-parallel rank 0, of the last step

    def forward(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Hidden rows and logits of each rank of the last stage; every replica runs the same batch."""
        self.hops = []
        hops: list[Hop | None] = [None] * self.topology.stage_world
        outputs: list = []
        for stage in range(self.topology.stages):
            first = stage * self.topology.stage_world

            def run(inside: int, first: int = first, hops: list[Hop | None] = hops) -> Hop | Tensor:
                rank = first + inside
                return self.stages[rank].forward(batch, hops[inside], self.steps[rank].append)

            outputs = self._run_all(run)
            if stage < self.topology.last_stage:
                hops = outputs
                self.hops.append(outputs[0])
        last = self.topology.last_stage * self.topology.stage_world
        logits = self._run_all(lambda inside: self.stages[last + inside].logits(outputs[inside]))
        return list(zip(outputs, logits, strict=True))

    def step(self, rows: Sequence[tuple[Request, int]], mode: Mode, padding: int = 0) -> Tensor:
        """Runs the next `count` rows of each sequence, then `padding` one-row padding sequences -> logits of all rows."""
        batch = make_batch(rows, mode, padding)
        for sequence, count in rows:
            sequence.done += count
        return self.forward(batch)[0][1]

    def _run_all(self, run: Callable[[int], object]) -> list:
        world = self.topology.stage_world
        if world == 1:
            return [run(0)]

        def guarded(inside: int) -> object:
            try:
                return run(inside)
            except BaseException:
                for group in self._groups:
                    group.abort()
                raise

        with ThreadPoolExecutor(world) as pool:
            return [future.result() for future in [pool.submit(guarded, n) for n in range(world)]]


def make_batch(rows: Sequence[tuple[Request, int]], mode: Mode, padding: int = 0) -> ForwardBatch:
    tokens, positions, slots, bounds = [], [], [], [0]
    for sequence, count in rows:
        window = range(sequence.done, sequence.done + count)
        tokens += [sequence.tokens[p] for p in window]
        positions += window
        slots += [sequence.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in window]
        bounds.append(bounds[-1] + count)
    width = max([len(sequence.blocks) for sequence, _ in rows], default=1)
    tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in rows] + [[0] * width] * padding
    return ForwardBatch(
        mode=mode,
        tokens=torch.tensor(tokens + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        cu_seqlens=torch.tensor(bounds + [bounds[-1] + n + 1 for n in range(padding)], dtype=torch.int32),
        context_lens=torch.tensor([s.done + count for s, count in rows] + [0] * padding, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        write_slots=torch.tensor(slots + [0] * padding),
        slots=torch.tensor([sequence.slot for sequence, _ in rows] + [0] * padding),
        fresh=torch.tensor([sequence.done == 0 for sequence, _ in rows] + [False] * padding),
    )


def request(tokens: list[int], slot: int = 1, first_block: int = 1) -> Request:
    """A request whose blocks are not in order, as an allocator would give them after some time."""
    count = blocks_for(len(tokens))
    return Request(tokens, [first_block + count - 1 - n for n in range(count)], slot)
