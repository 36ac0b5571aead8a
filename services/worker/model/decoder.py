"""One pipeline stage of the K3 decoder (spec k3-model §2). How a worker builds and runs it:

    from services.worker.model.backends import choose_ops
    from services.worker.model.decoder import DecoderStage
    from services.worker.model.loader import load_stage_weights

    ops, choices = choose_ops(model, topology, device, dtype, cache_dtype,
                              attention_backend="auto", kda_backend="auto", moe_backend="auto")
    weights = load_stage_weights(path, model, topology, place, dtype, device)     # a dict, emptied by DecoderStage
    stage = DecoderStage(model, topology, place, weights, caches, tp, experts, ops)

    out = stage.forward(batch, hop, on_step)     # Hop, or the final hidden [T, h] on the last stage
    logits = stage.logits(out[rows])             # [R, vocab] float32, equal on all tensor-parallel ranks (collective)

`path` is the checkpoint's folder, `device` a torch.device or its name, `dtype` and `cache_dtype` torch dtypes; `choices` is
the table for the log (kernels.registry.format_table). The first two raise ConfigError.
"""

from collections.abc import Callable, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.model import ModelConfig
from services.contracts.topology import RankPlace, Topology
from services.worker.model.attn_res import Residual, take_mix_weight
from services.worker.model.batch import ExpertDispatcher, ForwardBatch, Hop, LayerCaches, TensorParallel
from services.worker.model.kda import KdaAttention
from services.worker.model.mla import MlaAttention
from services.worker.model.mlp import DenseFfn
from services.worker.model.moe import MoeFfn


class DecoderStage:
    """The layers of one rank's window, with the embedding on the first stage and the head on the last."""

    def __init__(
        self,
        model: ModelConfig,
        topology: Topology,
        place: RankPlace,
        weights: MutableMapping[str, Tensor],
        caches: LayerCaches,
        tp: TensorParallel,
        experts: ExpertDispatcher,
        ops: Ops,
    ):
        """Takes every tensor out of `weights` (of load_stage_weights), so a backend that repacks one frees the original."""
        self._model, self._tp, self._ops = model, tp, ops
        self._first, self._last = place.stage == 0, place.stage == topology.last_stage
        self._capacity = model.closed_blocks_before(place.window.stop)
        if self._first:
            self._embedding = weights.pop("model.embed_tokens.weight")
        self._layers = [_Layer(model, layer, weights, caches, tp, experts, ops) for layer in place.window]
        if self._last:
            self._out_mix = take_mix_weight(weights, "model.output_attn_res")
            self._out_norm = weights.pop("model.norm.weight")
            self._head = weights.pop("lm_head.weight")
        assert not weights, f"weights that no layer took: {sorted(weights)}"

    def forward(self, batch: ForwardBatch, hop: Hop | None, on_step: Callable[[int], None]) -> Hop | Tensor:
        """Runs the batch's rows through the stage's layers; collective over the TP and EP groups.

        `hop` is what the stage before sent, None on the first. `on_step(i)` is called when the i-th owned layer has written
        its caches (in the device's order). -> Hop for the next stage; on the last the final hidden [T, h], normed.
        """
        if self._first:
            residual = self._residual(self._embed(batch.tokens), None)
        else:
            assert hop is not None, "a later stage continues from a hop"
            residual = self._residual(hop.prefix, hop.blocks)
        for step, layer in enumerate(self._layers):
            layer.attend(residual, batch)
            on_step(step)
            layer.feed(residual, batch)
        if not self._last:
            return residual.hop()
        return self._ops.rms_norm(residual.mix(self._out_mix), self._out_norm, self._model.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, h] of the last stage -> [R, vocab] float32, gathered over TP (collective)."""
        shards = self._tp.all_gather(F.linear(hidden, self._head).float())
        return shards.unflatten(0, (self._tp.size, -1)).transpose(0, 1).flatten(1)

    def _residual(self, prefix: Tensor, closed: Tensor | None) -> Residual:
        return Residual(prefix, closed, self._capacity, self._ops.attn_res_mix, self._model.rms_norm_eps)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Each rank knows a range of the vocabulary; the others' rows are zero there, so the sum is exact."""
        rows = self._embedding.shape[0]
        local = tokens - self._tp.rank * rows
        mine = (local >= 0) & (local < rows)
        return self._tp.all_reduce(torch.where(mine.unsqueeze(-1), self._embedding[torch.where(mine, local, 0)], 0.0))


class _Layer:
    """One decoder layer: two mixes over depth, each before its sublayer."""

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        weights: MutableMapping[str, Tensor],
        caches: LayerCaches,
        tp: TensorParallel,
        experts: ExpertDispatcher,
        ops: Ops,
    ):
        name = f"model.layers.{layer}"
        self._eps, self._ops = model.rms_norm_eps, ops
        self._closes = model.closes_block(layer)
        self._attention_mix = take_mix_weight(weights, f"{name}.self_attention_res")
        self._attention_norm = weights.pop(f"{name}.input_layernorm.weight")
        self._ffn_mix = take_mix_weight(weights, f"{name}.mlp_res")
        self._ffn_norm = weights.pop(f"{name}.post_attention_layernorm.weight")
        attention = f"{name}.self_attn"
        if model.is_mla(layer):
            self._attention = MlaAttention(model, weights, attention, caches.mla[layer], tp, ops)
        else:
            rec, conv = caches.kda_rec[layer], caches.kda_conv[layer]
            self._attention = KdaAttention(model, weights, attention, rec, conv, tp, ops)
        if model.is_dense(layer):
            self._ffn = DenseFfn(model, weights, f"{name}.mlp", tp, ops)
        else:
            self._ffn = MoeFfn(model, weights, f"{name}.block_sparse_moe", tp, experts, ops)

    def attend(self, residual: Residual, batch: ForwardBatch) -> None:
        x = self._ops.rms_norm(residual.mix(self._attention_mix), self._attention_norm, self._eps)
        a = self._attention(x, batch)
        if self._closes:
            residual.close(a)
        else:
            residual.add(a)

    def feed(self, residual: Residual, batch: ForwardBatch) -> None:
        x = self._ops.rms_norm(residual.mix(self._ffn_mix), self._ffn_norm, self._eps)
        residual.add(self._ffn(x, batch.write_slots, batch.mode))
