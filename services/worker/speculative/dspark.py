"""A K3 DSpark drafter (spec speculation §3 to §6): projections of the target's taps, and a small network that proposes a
block of tokens in one forward pass, corrected by a rank-r Markov head one after the other. Heads, MLP and vocabulary are
sharded over TP like the target's.
"""

from collections.abc import Callable, Mapping, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.draft import DraftConfig, Tap
from services.contracts.draft_sharding import EMBEDDING
from services.worker.model.batch import TensorParallel, cache_slots
from services.worker.model.vocabulary import Embedding
from services.worker.speculative.capture import CaptureTarget
from services.worker.speculative.dspark_layer import Block, DSparkLayer
from services.worker.speculative.rotary import frequencies, rotate


class K3DSparkModel:
    """What one rank holds: its stage's tap projections and, on the last stage, the proposal network."""

    def __init__(
        self,
        draft: DraftConfig,
        taps: tuple[Tap, ...],
        weights: MutableMapping[str, Tensor],
        caches: list[Tensor],
        tp: TensorParallel,
        ops: Ops,
        device: torch.device | str = "cpu",
    ):
        """Takes every tensor out of `weights` (of load_dspark). taps: this stage's; caches: one [blocks, 128, 1, row] for each
        draft layer on the last stage, none elsewhere."""
        self.width = draft.hidden_size
        self.device = torch.device(device)
        self._draft, self._taps, self._tp, self._ops = draft, taps, tp, ops
        self._fc_norm = {tap.index: weights.pop(f"fc_norm.{tap.index}.weight") for tap in taps if draft.fc_norm}
        self._project = {tap.index: weights.pop(f"context_proj.{tap.index}") for tap in taps}
        self._layers: list[DSparkLayer] = []
        own = weights.pop(EMBEDDING, None)
        self._embed: Callable[[Tensor], Tensor] | None = None if own is None else Embedding(own, tp)
        self._head: Callable[[Tensor], Tensor] | None = None
        if caches:
            frequency = self._frequency = frequencies(draft.rope, draft.qk_rope_head_dim).to(self.device)
            self._kv_a = weights.pop("kv_a_proj.weight")  # of all layers, one below the other
            kv_a = self._kv_a.unflatten(0, (draft.num_hidden_layers, draft.mla_row))
            self._layers = [
                DSparkLayer(draft, f"layers.{n}", weights, kv_a[n], cache, frequency, tp, ops) for n, cache in enumerate(caches)
            ]
            self._context_norm = weights.pop("context_norm.weight")
            self._final_norm = weights.pop("final_norm.weight")
            self._markov_in = weights.pop("markov_head.markov_w1.weight")  # [vocab, r]
            self._markov_out = weights.pop("markov_head.markov_w2.weight")  # [vocab / TP, r]
        assert not weights, f"drafter weights that nothing took: {sorted(weights)}"

    def configure_target(self, target: CaptureTarget) -> None:
        """Select this stage's taps; on the last stage borrow the target's head, and its embedding where there is no own."""
        target.select_taps(self._taps)
        if self._layers:
            self._head = target.local_logits
            if self._embed is None:
                self._embed = target.embed

    def project(self, index: int, rows: Tensor) -> Tensor:
        """A tap's share of the context sum: [T, h] -> [T, d]."""
        return F.linear(self._normed(index, rows), self._project[index])

    def side_by_side(self, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """All taps of this stage, [T, h] by index, as one projection's rows [T, taps * h] and weight [d, taps * h]."""
        rows = [self._normed(index, taps[index]) for index in sorted(taps)]
        return torch.cat(rows, -1), torch.cat([self._project[index] for index in sorted(taps)], -1)

    def context(self, total: Tensor) -> Tensor:
        """The complete sum [T, d] float32 -> C [T, d], of the model's dtype. Once, after the last tap."""
        return self._ops.rms_norm(total.to(self._kv_a.dtype), self._context_norm, self._draft.rms_norm_eps)

    def write_context(self, context: Tensor, positions: Tensor, write_slots: Tensor) -> None:
        """C [T, d] -> the row of each position in every draft layer's cache, without the layers' input norms."""
        rows = F.linear(context, self._kv_a).unflatten(-1, (len(self._layers), -1))
        latents, keys = rows.split([self._draft.kv_lora_rank, self._draft.qk_rope_head_dim], dim=-1)
        keys = rotate(keys, positions, self._frequency)
        for layer, latent, key in zip(self._layers, latents.unbind(1), keys.unbind(1), strict=True):
            layer.write(latent, key, write_slots)

    def propose(self, anchors: Tensor, positions: Tensor, block_tables: Tensor, count: int) -> Tensor:
        """`count` proposals after each anchor, greedy: [B, count] int64, equal on all TP ranks (collective).

        anchors [B] int64 stand at positions [B] int64, before which every position has its context row; block_tables [B, M]
        have room for count rows more, which this writes.
        """
        assert self._embed is not None and self._head is not None, "configure_target comes before the first proposal"
        tokens = torch.full((len(anchors), count), self._draft.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        at = positions.unsqueeze(1) + torch.arange(count, device=anchors.device)
        block = Block(
            positions=at.flatten(),
            write_slots=cache_slots(block_tables, at).flatten(),
            block_tables=block_tables,
            context_lens=(positions + count).int(),
            cu_seqlens=torch.arange(0, tokens.numel() + 1, count, dtype=torch.int32, device=anchors.device),
            plans={},
        )
        x = self._embed(tokens.flatten())
        for layer in self._layers:
            x = layer(x, block)
        hidden = self._ops.rms_norm(x, self._final_norm, self._draft.rms_norm_eps)
        base = self._head(hidden).unflatten(0, (-1, count))  # [B, count, vocab / TP]
        proposals = [anchors]
        for row in base.unbind(1):  # row k - 1 predicts proposal k
            proposals.append(self._next(row, proposals[-1]))
        return torch.stack(proposals[1:], 1)

    def _normed(self, index: int, rows: Tensor) -> Tensor:
        return self._ops.rms_norm(rows, self._fc_norm[index], self._draft.rms_norm_eps) if self._fc_norm else rows

    def _next(self, base: Tensor, token: Tensor) -> Tensor:
        """argmax of base [B, vocab / TP] plus the bias of the token before, over all ranks; the smallest id on ties."""
        bias = F.linear(self._markov_in[token.clamp(0, self._draft.vocab_size - 1)], self._markov_out)
        value, local = (base + bias.float()).max(-1)
        best = torch.stack([value.double(), (local + self._tp.rank * base.shape[1]).double()], -1)
        best = self._tp.all_gather(best).unflatten(0, (self._tp.size, -1))  # [TP, B, 2], ids ascending with the rank
        return best[best[..., 0].argmax(0), torch.arange(len(token), device=token.device), 1].long()
