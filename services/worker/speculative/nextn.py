"""The NextN (MTP) drafter (spec speculation §11): one more MLA and MoE layer of the target's kind behind its last, which reads
the token after a position and the target's final hidden there, and predicts the token after that one.

It only stands on the last stage. Its cache has a row for each position, like the target's; being of one layer, it needs no
attention and no experts to write one, so only the rows that propose go through the whole layer. Every rank of an expert group
takes the same number of steps, idle replicas too, because the layer's experts are spread over all of them.
"""

from collections.abc import Callable, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.draft_sharding import EMBEDDING
from services.contracts.model import ModelConfig
from services.worker.model.batch import ExpertDispatcher, ForwardBatch, Hop, TensorParallel, cache_slots
from services.worker.model.mla import MlaAttention
from services.worker.model.moe import MoeFfn
from services.worker.model.vocabulary import Embedding, gather_vocabulary
from services.worker.speculative.capture import Capture, CaptureTarget
from services.worker.speculative.drafter import Steps, sequence_of


class NextNModel:
    """The layer as one rank holds it."""

    def __init__(
        self,
        model: ModelConfig,
        weights: MutableMapping[str, Tensor],
        cache: Tensor,  # [blocks, 128, 1, mla_row]
        tp: TensorParallel,
        experts: ExpertDispatcher,
        ops: Ops,
    ):
        """Takes every tensor out of `weights` (of load_nextn)."""
        self._eps, self._tp, self._ops = model.rms_norm_eps, tp, ops
        own = weights.pop(EMBEDDING, None)
        self._embed: Callable[[Tensor], Tensor] | None = None if own is None else Embedding(own, tp)
        self._head: Callable[[Tensor], Tensor] | None = None
        self._token_norm = weights.pop("enorm.weight")
        self._hidden_norm = weights.pop("hnorm.weight")
        self._merge = weights.pop("eh_proj.weight")  # columns: embedding, then hidden
        self._input_norm = weights.pop("input_layernorm.weight")
        self._attention = MlaAttention(model, weights, "self_attn", cache, tp, ops)
        self._ffn_norm = weights.pop("post_attention_layernorm.weight")
        self._ffn = MoeFfn(model, weights, "block_sparse_moe", tp, experts, ops)
        self._out_norm = weights.pop("shared_head.norm.weight")
        assert not weights, f"NextN weights that nothing took: {sorted(weights)}"

    def configure_target(self, target: CaptureTarget) -> None:
        """Borrow the target's head, and its embedding where there is no own; nothing is captured."""
        target.select_taps(())
        self._head = target.local_logits
        if self._embed is None:
            self._embed = target.embed

    def write(self, following: Tensor, hidden: Tensor, write_slots: Tensor) -> None:
        """following [T], hidden [T, h] of rows -> their cache rows."""
        x = self._merged(following, hidden)
        self._attention.write(self._ops.rms_norm(x, self._input_norm, self._eps), write_slots)

    def __call__(self, following: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """following [T], hidden [T, h] of the batch's rows -> out [T, h], normed: the next step's hidden. Writes the cache."""
        norm, eps = self._ops.rms_norm, self._eps
        x = self._merged(following, hidden)
        x = x + self._attention(norm(x, self._input_norm, eps), batch)
        x = x + self._ffn(norm(x, self._ffn_norm, eps), batch.write_slots, batch.mode)
        return norm(x, self._out_norm, eps)

    def _merged(self, following: Tensor, hidden: Tensor) -> Tensor:
        assert self._embed is not None, "configure_target comes before the first step"
        token = self._ops.rms_norm(self._embed(following), self._token_norm, self._eps)
        return F.linear(torch.cat([token, self._ops.rms_norm(hidden, self._hidden_norm, self._eps)], -1), self._merge)

    def choose(self, out: Tensor) -> Tensor:
        """[E, h] -> the likeliest token of each, [E] int64; the smallest id on ties. Collective over TP."""
        assert self._head is not None, "configure_target comes before the first step"
        return gather_vocabulary(self._head(out), self._tp).argmax(-1)


class NoCapture:
    """NextN reads the final hidden alone."""

    def take(self, index: int, rows: Tensor) -> None:
        raise AssertionError("nothing was selected")

    def onto(self, hop: Hop) -> Hop:
        return hop


class NextNDrafter:
    """Rewrites the batch's rows with what the target says of them, then drafts one token after the other."""

    collective = True

    def __init__(self, model: NextNModel):
        self._model = model

    def context_rows(self, rows: int) -> None:
        return None

    def begin(self, rows: int, hop: Hop | None) -> NoCapture:
        return NoCapture()

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, capture: Capture, following: Tensor, heads: Tensor, steps: Steps
    ) -> Tensor:
        self._model.write(following, hidden, batch.write_slots)
        if not len(heads):
            return heads.new_zeros(0, steps.proposals)
        proposals, token, out = heads.new_zeros(len(heads), steps.proposals), following[heads], hidden[heads]
        for distance in range(steps.proposals):
            out = self._model(token, out, _rows_behind(batch, heads, distance))
            token = self._model.choose(out)
            proposals[:, distance] = token
        for _ in range(steps.most - steps.proposals):
            self._model(following[:1], hidden[:1], _padding(batch))
        return proposals

    def watch(self) -> NoCapture:
        return NoCapture()

    def inputs(self, capture: Capture, hidden: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        return following, hidden

    def write(self, inputs: tuple[Tensor, ...], positions: Tensor, write_slots: Tensor) -> None:
        following, hidden = inputs
        self._model.write(following, hidden, write_slots)


def _rows_behind(batch: ForwardBatch, heads: Tensor, distance: int) -> ForwardBatch:
    """One row for each head's sequence, `distance` positions behind the head; what the cache has beyond it is not seen."""
    return _single_rows(batch, batch.positions[heads] + distance, batch.block_tables[sequence_of(batch, heads)])


def _padding(batch: ForwardBatch) -> ForwardBatch:
    """One row that belongs to nobody: other replicas take a step."""
    return _single_rows(batch, torch.zeros_like(batch.positions[:1]), torch.zeros_like(batch.block_tables[:1]))


def _single_rows(batch: ForwardBatch, positions: Tensor, tables: Tensor) -> ForwardBatch:
    return ForwardBatch(
        mode=batch.mode,
        tokens=positions,  # not read: the layer is given its tokens
        positions=positions,
        cu_seqlens=torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device),
        context_lens=(positions + 1).int(),
        block_tables=tables,
        write_slots=cache_slots(tables, positions.unsqueeze(1)).squeeze(1),
        slots=torch.zeros_like(positions),
        fresh=torch.zeros_like(positions, dtype=torch.bool),
    )
