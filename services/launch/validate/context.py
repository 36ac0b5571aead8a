"""Step 3: the drafter's context summed over pipeline stages against one stage and one concatenated projection, for both
streams, with and without a norm of each tap, and with stages that begin before, at and behind a tap and a closing layer."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.contracts.arguments import EngineArguments
from services.contracts.draft import DraftConfig
from services.contracts.geometry import Geometry
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.placement import place as place_fields
from services.contracts.topology import Topology
from services.launch import make_checkpoint
from services.launch.validate.drawn import relative_error
from services.launch.validate.report import Found, check
from services.launch.validate.site import Site
from services.worker.memory_profile import dry_caches
from services.worker.model.backends import choose_draft_ops, choose_ops, op_geometry
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.model.decoder import DecoderStage
from services.worker.model.loader import load_stage_weights
from services.worker.parallel.collectives import GlooTensorParallel
from services.worker.parallel.group import Group
from services.worker.parallel.sole import SoleExperts
from services.worker.speculative.build import build_drafter
from services.worker.speculative.context_producer import TapRows
from services.worker.speculative.drafter import DSparkDrafter

LAYERS, TAPS, ROWS = 13, "2,4,8,12", 100  # a block closes inside layers 0, 4, 8 and 12
PARTITIONS = ((6, 7), (3, 4, 3, 3), (4, 4, 5), (5, 3, 5))  # boundaries before, at and behind layers 3, 4 and 8
LIMIT = 1e-4  # float32 adds in another order, over 13 layers


def run(site: Site) -> Found:
    target = site.folder / "target"
    _make(target, [])
    checks = []
    for stream in ("prefix", "attn_res"):
        for fc_norm in (False, True):
            drafter = site.folder / f"{stream}-{fc_norm}"
            more = ["--draft", "dspark", "--target-layer-ids", TAPS, "--aux-hidden-stream", stream]
            _make(drafter, more + ["--fc-norm"] * fc_norm)
            whole = _Pipeline(target, drafter, (LAYERS,), site.device)
            total = whole.context()
            errors = [relative_error(_Pipeline(target, drafter, it, site.device).context(), total) for it in PARTITIONS]
            concatenated = relative_error(total, whole.concatenated())
            worst = max(*errors, concatenated)
            figure = f"over {len(PARTITIONS)} partitions {max(errors):.1e}, concatenated {concatenated:.1e}, all finite"
            compared = f"context of stream {stream}, {'with' if fc_norm else 'without'} fc_norm: relative error"
            checks.append(check(compared, figure, worst <= LIMIT, f"at most {LIMIT:g}"))
    return checks, {"layers": LAYERS, "taps": TAPS, "partitions": PARTITIONS}


def _make(folder: Path, words: list[str]) -> None:
    assert make_checkpoint.main([str(folder), "--no-tokenizer", "--num-hidden-layers", str(LAYERS), *words]) == 0


@dataclass(frozen=True, slots=True)
class _Stage:
    stage: DecoderStage
    drafter: DSparkDrafter


class _Pipeline:
    """All stages of a target with their parts of a drafter, one after the other in this process; no tensor parallelism."""

    def __init__(self, target: Path, drafter: Path, partition: tuple[int, ...], device: str):
        words = [
            "--model",
            str(target),
            "--disaggregation-mode",
            "prefill",
            "--dtype",
            "float32",
            "--speculative-algorithm",
            "DSPARK",
        ]
        words += ["--pipeline-parallel-size", str(len(partition)), "--speculative-draft-model-path", str(drafter)]
        words += ["--pp-layer-partition", ",".join(map(str, partition))] if len(partition) > 1 else []
        self._arguments = EngineArguments.parse(words)
        self._device = torch.device(device)
        model = self._arguments.load_model_config()
        draft = self._arguments.load_draft_config(model)
        assert isinstance(draft, DraftConfig)
        self._draft, topology = draft, self._arguments.topology(model)
        self._stages = [self._build(topology, stage, target, drafter) for stage in range(topology.stages)]

    def context(self) -> Tensor:
        """The complete sum, [ROWS, d] float32."""
        hop, total = None, torch.empty(0)
        for it in self._stages:
            capture = it.drafter.begin(ROWS, hop)
            out = it.stage.forward(self._batch(), hop, lambda step: None, capture.take)
            hop, total = capture.onto(out) if isinstance(out, Hop) else None, capture.total
        return total

    def concatenated(self) -> Tensor:
        """Of one stage: all taps side by side, through one matrix."""
        (it,) = self._stages
        taps = TapRows()
        it.stage.forward(self._batch(), None, lambda step: None, taps.take)
        rows, weights = it.drafter.model.side_by_side(taps.rows)
        return F.linear(rows.double(), weights.double())

    def _build(self, topology: Topology, stage: int, target: Path, drafter: Path) -> _Stage:
        a, dtype, device = self._arguments, torch.float32, self._device
        model, place = a.load_model_config(), topology.place_of(topology.rank_of(stage, 0, 0))
        geometry = Geometry(model, topology, "float32", self._draft.cache_layers, self._draft.mla_row)
        record = place_fields(
            geometry, place, engine_id="", engine_epoch=0, model_fingerprint="", num_blocks=2, num_slots=2, verify_width=1
        )
        caches = dry_caches(record, device)
        tp = GlooTensorParallel(Group("tp", [0], 0, None, "", 60.0))
        ops, _ = choose_ops(model, topology, device, dtype, dtype)
        weights = load_stage_weights(target, model, topology, place, dtype, device)
        built = DecoderStage(model, topology, place, weights, caches, tp, SoleExperts(), ops)
        draft_ops, _ = choose_draft_ops(ops, op_geometry(model, topology, dtype, dtype), self._draft, topology, device, "auto")
        part = build_drafter(
            drafter, self._draft, model, topology, place, built, caches, tp, SoleExperts(), draft_ops, dtype, device
        )
        assert isinstance(part, DSparkDrafter)
        return _Stage(built, part)

    def _batch(self) -> ForwardBatch:
        """One prompt, in block 1 and slot 1."""
        at = torch.arange(ROWS, device=self._device)
        one = torch.ones(1, dtype=torch.int64, device=self._device)
        return ForwardBatch(
            mode="extend",
            tokens=at * at % 500,
            positions=at,
            cu_seqlens=torch.tensor([0, ROWS], device=self._device).int(),
            context_lens=(one * ROWS).int(),
            block_tables=one.int().unsqueeze(0),
            write_slots=BLOCK_TOKENS + at,
            slots=one,
            fresh=one.bool(),
        )
