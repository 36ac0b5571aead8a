"""A target with its drafter in one process: every rank of a topology as a thread (tests.lib.golden.Engine)."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from services.contracts.draft import Draft, parse_draft_config, parse_nextn_config
from services.contracts.geometry import BLOCK_TOKENS
from services.contracts.model import ModelConfig
from services.contracts.topology import Topology
from services.launch.make_checkpoint import main as make_checkpoint
from services.worker.model.backends import choose_draft_ops, choose_ops, op_geometry
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.speculative.build import build_drafter
from services.worker.speculative.drafter import Drafter
from tests.lib.draft_oracle import DSparkOracle, NextNOracle, TargetOracle
from tests.lib.golden import Engine, ThreadTensorParallel, golden_model

SMALL = [  # six layers with closing layers 0 and 3, two of them MLA
    "--no-tokenizer", "--vocab-size", "512", "--hidden-size", "64", "--num-hidden-layers", "6", "--full-attn-layers", "3,6",
    "--attn-res-block-size", "3", "--num-experts", "8", "--num-experts-per-token", "2", "--intermediate-size", "96",
    "--kda-head-dim", "16", "--moe-intermediate-size", "32", "--routed-expert-hidden-size", "32", "--q-lora-rank", "24",
]  # fmt: skip


@dataclass(frozen=True)
class Checkpoints:
    """A small target that has a NextN layer, and DSpark drafters for it."""

    folder: Path

    @property
    def target(self) -> Path:
        return self._made("target", "--draft", "nextn")

    def dspark(self, taps: str = "1,3,5", stream: str = "prefix", fc_norm: bool = False, *more: str) -> Path:
        flags = ["--target-layer-ids", taps, "--aux-hidden-stream", stream, *(["--fc-norm"] if fc_norm else []), *more]
        return self._made(f"dspark-{taps}-{stream}-{fc_norm}{'-'.join(more)}", "--draft", "dspark", *flags)

    def _made(self, name: str, *flags: str) -> Path:
        assert make_checkpoint([str(self.folder / name), *SMALL, *flags]) == 0
        return self.folder / name

    @cache  # noqa: B019 - lives as long as the module's fixture
    def oracle(self) -> TargetOracle:
        return TargetOracle(self.target, "float64")

    def dspark_oracle(self, folder: Path) -> DSparkOracle:
        return DSparkOracle(folder, self.oracle())

    def nextn_oracle(self) -> NextNOracle:
        return NextNOracle(self.oracle())


def read_draft(folder: Path, model: ModelConfig, algorithm: str) -> Draft:
    config = json.loads((folder / "config.json").read_text())
    parse = parse_draft_config if algorithm == "DSPARK" else parse_nextn_config
    return parse(config, str(folder / "config.json"), model)


class DraftedEngine(Engine):
    """An engine whose ranks hold their parts of a drafter."""

    def __init__(
        self, target: Path, folder: Path, topology: Topology, width: int = 8, algorithm: str = "DSPARK",
        dtype: torch.dtype = torch.float32, num_blocks: int = 8,
    ):  # fmt: skip
        super().__init__(str(target), topology, dtype, num_blocks)
        self.draft = read_draft(folder, golden_model(str(target)), algorithm)
        target_ops, _ = choose_ops(self.model, topology, "cpu", dtype, dtype)
        ops, _ = choose_draft_ops(
            target_ops, op_geometry(self.model, topology, dtype, dtype), self.draft, topology, "cpu", "auto"
        )
        tp_groups = self._groups[topology.stages :]
        self.drafters: list[Drafter | None] = []
        for rank, stage in enumerate(self.stages):
            place = topology.place_of(rank)
            if place.stage == topology.last_stage:
                for n in range(self.draft.cache_layers):
                    pool = torch.full((num_blocks, BLOCK_TOKENS, 1, self.draft.mla_row), float("nan"), dtype=dtype)
                    pool[0] = 0
                    self.caches[rank].draft[self.model.num_hidden_layers + n] = pool
            tp = ThreadTensorParallel(place.tp, topology.tp_size, tp_groups[rank // topology.tp_size])
            self.drafters.append(
                build_drafter(
                    folder, self.draft, self.model, topology, place, stage, self.caches[rank], tp, self.dispatchers[rank],
                    ops, dtype, width,
                )
            )  # fmt: skip

    def run(self, batch: ForwardBatch, following: Tensor, heads: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Hidden rows and proposals of each rank of the last stage."""
        hops: list[Hop | None] = [None] * self.topology.stage_world
        for stage in range(self.topology.stages):
            first = stage * self.topology.stage_world

            def run(inside: int, first: int = first, hops: list = hops):
                return self._run(first + inside, batch, hops[inside], following, heads)

            hops = self._run_all(run)
        return hops  # type: ignore[return-value]

    def _run(self, rank: int, batch: ForwardBatch, hop: Hop | None, following: Tensor, heads: Tensor):
        drafter = self.drafters[rank]
        if drafter is None:
            return self.stages[rank].forward(batch, hop, lambda step: None)
        capture = drafter.begin(len(batch.tokens), hop)
        out = self.stages[rank].forward(batch, hop, lambda step: None, capture.take)
        if isinstance(out, Hop):
            return capture.onto(out)
        return out, drafter.draft(batch, out, capture, following, heads)
