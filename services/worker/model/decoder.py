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
    stage.commit(batch, accepted)                # after a batch with `verify`: KDA moves on by the accepted rows

`path` is the checkpoint's folder, `device` a torch.device or its name, `dtype` and `cache_dtype` torch dtypes; `choices` is
the table for the log (kernels.registry.format_table). The first two raise ConfigError.
"""

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.draft import Tap, TapKind
from services.contracts.model import ModelConfig
from services.contracts.topology import RankPlace, Topology
from services.worker.model.attn_res import Residual, take_mix_weight
from services.worker.model.batch import ExpertDispatcher, ForwardBatch, Hop, LayerCaches, TensorParallel
from services.worker.model.kda import KdaAttention
from services.worker.model.mla import MlaAttention
from services.worker.model.mlp import DenseFfn
from services.worker.model.moe import MoeFfn
from services.worker.model.vocabulary import Embedding, gather_vocabulary

TapSink = Callable[[int, Tensor], None]  # a tap's index and its rows [T, h], to be consumed at once


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
        self._taps: dict[tuple[TapKind, int], int] | None = None
        if self._first:
            self.embed = Embedding(weights.pop("model.embed_tokens.weight"), tp)
        self._window = place.window
        self._layers = [_Layer(model, layer, weights, caches, tp, experts, ops) for layer in place.window]
        if self._last:
            self._out_mix = take_mix_weight(weights, "model.output_attn_res")
            self._out_norm = weights.pop("model.norm.weight")
            self._head = weights.pop("lm_head.weight")
        assert not weights, f"weights that no layer took: {sorted(weights)}"

    def select_taps(self, taps: Iterable[Tap]) -> None:
        """What a drafter captures here: once, after loading, by its configure_target."""
        assert self._taps is None, "a target's taps are selected once"
        self._taps = {(tap.kind, tap.layer): tap.index for tap in taps}

    def forward(
        self, batch: ForwardBatch, hop: Hop | None, on_step: Callable[[int], None], on_tap: TapSink | None = None
    ) -> Hop | Tensor:
        """Runs the batch's rows through the stage's layers; collective over the TP and EP groups.

        `hop` is what the stage before sent, None on the first. `on_step(i)` is called when the i-th owned layer has written
        its caches (in the device's order), `on_tap` for each selected tap as it is passed. -> Hop for the next stage; on the
        last the final hidden [T, h], normed.
        """
        taps = self._taps or {}
        batch = replace(batch, plans={})

        def capture(kind: TapKind, layer: int, rows: Tensor) -> None:
            if (kind, layer) in taps:
                assert on_tap is not None, "who has selected taps takes them"
                on_tap(taps[kind, layer], rows)

        if self._first:
            residual = self._residual(self.embed(batch.tokens), None)
        else:
            assert hop is not None, "a later stage continues from a hop"
            residual = self._residual(hop.prefix, hop.blocks)
        for step, (number, layer) in enumerate(zip(self._window, self._layers, strict=True)):
            capture(TapKind.ENTRY, number, layer.attend(residual, batch))
            on_step(step)
            layer.feed(residual, batch)
            capture(TapKind.EXIT, number, residual.prefix)
        if not self._last:
            return residual.hop()
        out = residual.mix(self._out_mix)
        capture(TapKind.OUTPUT, self._window[-1], out)
        return self._ops.rms_norm(out, self._out_norm, self._model.rms_norm_eps)

    def commit(self, batch: ForwardBatch, accepted: Tensor) -> None:
        """After forward(batch) with `verify`: each sequence's KDA state moves on by its first accepted[b] rows. [B] int64."""
        for layer in self._layers:
            layer.commit(batch, accepted)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, h] of the last stage -> [R, vocab] float32, gathered over TP (collective)."""
        return gather_vocabulary(self.local_logits(hidden), self._tp)

    def local_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, h] of the last stage -> [R, vocab / TP] float32, this rank's part of the vocabulary."""
        return F.linear(hidden, self._head).float()

    def _residual(self, prefix: Tensor, closed: Tensor | None) -> Residual:
        return Residual(prefix, closed, self._capacity, self._ops.attn_res_mix, self._model.rms_norm_eps)


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

    def attend(self, residual: Residual, batch: ForwardBatch) -> Tensor:
        """-> the mixture that the layer has read, before its norm, [T, h]."""
        mixture = residual.mix(self._attention_mix)
        a = self._attention(self._ops.rms_norm(mixture, self._attention_norm, self._eps), batch)
        if self._closes:
            residual.close(a)
        else:
            residual.add(a)
        return mixture

    def commit(self, batch: ForwardBatch, accepted: Tensor) -> None:
        if isinstance(self._attention, KdaAttention):
            self._attention.commit(batch, accepted)

    def feed(self, residual: Residual, batch: ForwardBatch) -> None:
        x = self._ops.rms_norm(residual.mix(self._ffn_mix), self._ffn_norm, self._eps)
        residual.add(self._ffn(x, batch.write_slots, batch.mode))
