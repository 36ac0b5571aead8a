"""A target with its drafter in one process: every rank of a topology as a thread (tests.lib.golden.Engine)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path

import torch
from torch import Tensor

from kernels.ops import Ops
from services.contracts.barriers import Notice
from services.contracts.draft import Draft, parse_draft_config, parse_nextn_config
from services.contracts.geometry import BLOCK_TOKENS, Geometry, blocks_for
from services.contracts.model import ModelConfig
from services.contracts.placement import place as place_fields
from services.contracts.topology import Topology
from services.launch.make_checkpoint import main as make_checkpoint
from services.worker.cache.image import ImagePool
from services.worker.cache.pools import allocate
from services.worker.cache.slots import SlotStates
from services.worker.decode_round import DecodeReplica
from services.worker.device import CPU
from services.worker.hop import StageBoundary
from services.worker.model.backends import choose_draft_ops, choose_ops, op_geometry
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import Groups, join
from services.worker.parallel.sole import SoleExperts
from services.worker.prefill_step import PrefillStage
from services.worker.speculative.build import build_drafter
from services.worker.speculative.capture import Capture
from services.worker.speculative.drafter import Drafter, Steps, sequence_of
from services.worker.speculative.sampling import Sampling
from services.worker.wire import (
    ChunkRow,
    FirstToken,
    ForgetRooms,
    Mode,
    PlaceInstall,
    PlaceRestore,
    PlaceRetract,
    PrefillStep,
    RoundPlan,
    RoundResult,
    StepDone,
)
from tests.lib.draft_oracle import DSparkOracle, NextNOracle, TargetOracle
from tests.lib.golden import Engine, ThreadTensorParallel, golden_model, topology_of

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
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
        self.width = width
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
                    ops, dtype,
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
        return out, drafter.draft(batch, out, capture, following, heads, Steps(self.width - 1, self.width - 1))


class ForcedDrafter:
    """A drafter whose proposals are replaced: `hits` true tokens, then a wrong one. It still writes its own rows."""

    def __init__(self, drafter: Drafter, vocab: int):
        self._drafter, self._vocab = drafter, vocab
        self.collective = drafter.collective
        self.begin, self.watch, self.inputs, self.write = drafter.begin, drafter.watch, drafter.inputs, drafter.write
        self.truth: dict[int, list[int]] = {}  # by KDA slot, the tokens of each position
        self.hits: dict[int, list[int]] = {}  # by KDA slot, of the windows to come; the real proposals when it is empty

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, capture: Capture, following: Tensor, heads: Tensor, steps: Steps
    ) -> Tensor:
        proposals = self._drafter.draft(batch, hidden, capture, following, heads, steps)
        if not self.hits:
            return proposals
        for row, (head, sequence) in enumerate(zip(heads.tolist(), sequence_of(batch, heads).tolist(), strict=True)):
            slot, anchor = int(batch.slots[sequence]), int(batch.positions[head]) + 1
            if not self.hits.get(slot):
                continue
            hits = self.hits[slot].pop(0)
            window = self.truth[slot][anchor + 1 : anchor + 1 + steps.proposals]
            window = [token if n < hits else (token + 1) % self._vocab for n, token in enumerate(window)]
            proposals[row] = torch.tensor(window)
        return proposals


class SpeculativeRank:
    """A whole model with its drafter in one rank: prefill and decode share its caches, as if a handoff had copied them. With
    `groups` it is one rank of several replicas, which must all do the same at the same time."""

    PLACES, BLOCKS, SLOTS, IMAGES = 4, 40, 8, 60

    def __init__(
        self, target: Path, folder: Path | None, algorithm: str = "DSPARK", width: int = 8, groups: Groups | None = None,
        device: torch.device = CPU, change: Callable[[Ops], Ops] | None = None,
    ):  # fmt: skip
        """`change` makes of the CPU's ops those that the model gets, whose experts then are all here in all modes."""
        torch.set_num_threads(1)
        model = self.model = golden_model(str(target))
        topology, dtype = topology_of(model, dp=groups.ep.size if groups else 1), torch.float32
        draft = read_draft(folder, model, algorithm) if folder else None
        layers, row = (draft.cache_layers, draft.mla_row) if draft else (0, 0)
        geometry, place = Geometry(model, topology, "float32", layers, row), topology.place_of(groups.ep.rank if groups else 0)
        self.pools = allocate(
            place_fields(
                geometry, place, engine_id="test", engine_epoch=1, model_fingerprint="", num_blocks=self.BLOCKS,
                num_slots=self.SLOTS, verify_width=width,
            ),
            device,
        )  # fmt: skip
        self.caches = self.pools.caches
        groups = groups or join(topology, 0, "")
        ops, _ = choose_ops(model, topology, "cpu", dtype, dtype)
        ops = change(ops) if change else ops
        experts = SoleExperts() if change else GlooExperts(groups.ep, model.num_experts, 64)
        weights = load_stage_weights(target, model, topology, place, dtype, device)
        stage = DecoderStage(model, topology, place, weights, self.caches, groups.tp, experts, ops)
        self.forced: ForcedDrafter | None = None
        if draft is not None and folder is not None:
            draft_ops, _ = choose_draft_ops(ops, op_geometry(model, topology, dtype, dtype), draft, topology, "cpu", "auto")
            drafter = build_drafter(
                folder,
                draft,
                model,
                topology,
                place,
                stage,
                self.caches,
                groups.tp,
                experts,
                change(draft_ops) if change else draft_ops,
                dtype,
                device,
            )
            assert drafter is not None
            self.forced = ForcedDrafter(drafter, model.vocab_size)
        self.width = width if draft else 1
        self.notices: list[Notice] = []
        self.prefill = PrefillStage(
            stage, StageBoundary(groups.pipeline, model, place, dtype), self.notices.append, index=0,
            states=SlotStates(self.caches), producer_steps=len(geometry.producer_steps(0)), interval=1,
            verify_width=self.width, drafter=self.forced, device=device,
        )  # fmt: skip
        self.images = ImagePool(self.caches, self.IMAGES, groups.tp)
        self.decode = DecodeReplica(
            stage, replica=0, places=self.PLACES, max_model_len=1024, verify_width=self.width,
            vocab_size=model.vocab_size, drafter=self.forced, images=self.images, device=device,
        )  # fmt: skip
        self.mode = Mode.LOW_LATENCY_EAGER
        self._steps, self._rounds = 0, 0

    def start(self, job: "Job", chunks: Sequence[int] = (), proposals: int | None = None) -> FirstToken:
        """The prompt through prefill, in chunks that end at `chunks` and at its end; a full window unless told."""
        done = None
        bounds = [0, *chunks, len(job.prompt)]
        for start, end in pairwise(bounds):
            last = end == len(job.prompt)
            known = blocks_for(start)
            count = len(job.blocks) if last else blocks_for(end)
            self._steps += 1
            row = ChunkRow(
                f"r{job.place}", job.room, start, end, last, packed(job.prompt[start:end]), job.blocks[known:count], job.slot,
                job.rule if last else None, 0, 0 if last else job.prompt[end],
                self.width - 1 if proposals is None else proposals,
            )  # fmt: skip
            done = self.prefill.execute(PrefillStep(self._steps, (row,)))
        self.prefill.execute(ForgetRooms((job.room,)))
        assert isinstance(done, StepDone)
        return done.first_tokens[0]

    def install(self, job: "Job", first: FirstToken) -> PlaceInstall:
        return PlaceInstall(job.place, job.room, job.blocks, job.slot, len(job.prompt), first.window, job.rule)

    def round(
        self, jobs: Sequence["Job"], installs: Sequence[PlaceInstall] = (), clears: Sequence[int] = (),
        width: int | None = None, following: int | None = None, widest: int = 0,
        retracts: Sequence[PlaceRetract] = (), restores: Sequence[PlaceRestore] = (),
    ) -> RoundResult:  # fmt: skip
        """One round of `width`, which drafts for one of `following`, both full unless told; `widest` is that of any replica."""
        live = tuple(sorted(job.place for job in jobs))
        self._rounds += 1
        bucket, proposals = self.PLACES, (following or self.width) - 1
        head = (self._rounds, bucket, self.mode, tuple(installs), tuple(clears), (), live)
        widths = (width or self.width, proposals, max(proposals, widest - 1))
        return self.decode.execute(RoundPlan(*head, *widths, tuple(retracts), tuple(restores)))

    def generate(
        self, job: "Job", count: int, chunks: Sequence[int] = (), widths: Iterator[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """At least `count` tokens of one request alone, in rounds of these widths -> the tokens, and how many a round gave."""
        first = self.start(job, chunks)
        tokens, lengths, installs = [first.token], [], [self.install(job, first)]
        widths = repeat(self.width) if widths is None else widths
        following = next(widths)
        while len(tokens) < count:
            width, following = following, next(widths)
            (entry,) = self.round([job], installs, width=width, following=following).tokens
            tokens += entry.tokens
            lengths.append(len(entry.tokens))
            installs = []
        self.round([], clears=[job.place])
        return tokens, lengths


@dataclass(frozen=True)
class Job:
    """One request's prompt, place and memory. Its blocks have room for whatever a test decodes."""

    prompt: list[int]
    place: int = 0
    slot: int = 1
    blocks: tuple[int, ...] = (3, 1, 2, 5, 4)
    rule: Sampling = GREEDY

    @property
    def room(self) -> int:
        return 100 + self.place


def packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
