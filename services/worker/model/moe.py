"""The latent mixture of experts (spec k3-model §8, §9; its parallel form is spec moe-ep §1)."""

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import BLOCK_ROWS, Ops
from services.contracts.model import ModelConfig
from services.worker.model.batch import ExpertDispatcher, Mode, TensorParallel
from services.worker.model.mlp import Mlp


class MoeFfn:
    """One layer: each TP rank routes a slice of the rows, all share the up-projection and the shared experts."""

    def __init__(
        self,
        model: ModelConfig,
        weights: MutableMapping[str, Tensor],
        name: str,
        tp: TensorParallel,
        dispatcher: ExpertDispatcher,
        ops: Ops,
    ):
        self._model, self._tp, self._dispatcher, self._ops = model, tp, dispatcher, ops
        self._gate = weights.pop(f"{name}.gate.weight")
        self._bias = weights.pop(f"{name}.gate.e_score_correction_bias")
        self._latent_down = weights.pop(f"{name}.routed_expert_down_proj.weight")
        self._latent_up = weights.pop(f"{name}.routed_expert_up_proj.weight")  # this rank's output columns
        self._latent_norm = weights.pop(f"{name}.routed_expert_norm.weight")
        self._shared = Mlp(model, weights, f"{name}.shared_experts", ops)
        stacks = f"{name}.experts"
        self._experts = ops.prepare_experts(
            weights.pop(f"{stacks}.w13.weight_packed"),
            weights.pop(f"{stacks}.w13.weight_scale"),
            weights.pop(f"{stacks}.w2.weight_packed"),
            weights.pop(f"{stacks}.w2.weight_scale"),
            model.situ_beta,
            model.situ_linear_beta,
            self._latent_up.dtype,
        )

    def __call__(self, x: Tensor, write_slots: Tensor, mode: Mode) -> Tensor:
        """x [n, h], normed, equal on all TP ranks; write_slots [n] -> [n, h], reduced. Collective over the EP group."""
        rows = x.shape[0]
        mine, live = self._slice(x, write_slots)
        ids, weights = self._ops.router(
            mine,
            self._gate,
            self._bias,
            self._model.num_experts_per_token,
            self._model.moe_renormalize,
            self._model.routed_scaling_factor,
        )
        ids = torch.where(live, ids, -1)
        weights = torch.where(live, weights, 0.0)

        partial: Tensor | None = None

        def shared_experts() -> None:
            nonlocal partial
            partial = self._shared(x)

        z = F.linear(mine, self._latent_down)
        combined = self._dispatcher.forward(mode, z, ids, weights, self._experts, shared_experts)
        assert partial is not None, "the dispatcher must call overlap"

        routed = self._tp.all_gather(combined)[:rows]
        if self._model.latent_moe_use_norm:  # over the complete sum, never over a rank's part
            routed = self._ops.rms_norm(routed, self._latent_norm, self._model.rms_norm_eps)
        up = F.linear(routed, self._latent_up)
        first = self._tp.rank * up.shape[1]
        partial[:, first : first + up.shape[1]] += up
        return self._tp.all_reduce(partial)

    def _slice(self, x: Tensor, write_slots: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows [s, h], equally many on every rank, and [s, 1] bool which of them are no padding."""
        size = max(1, -(-x.shape[0] // self._tp.size))
        window = slice(self._tp.rank * size, (self._tp.rank + 1) * size)
        mine, slots = x[window], write_slots[window]
        missing = size - mine.shape[0]
        if missing:
            mine, slots = F.pad(mine, (0, 0, 0, missing)), F.pad(slots, (0, missing))
        return mine, (slots >= BLOCK_ROWS).unsqueeze(-1)
