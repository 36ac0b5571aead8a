"""The gated MLP of the dense layers and of the shared experts (spec k3-model §3, §7): rows, then columns, over TP."""

from collections.abc import MutableMapping

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from services.contracts.model import ModelConfig
from services.worker.model.batch import TensorParallel


class Mlp:
    """This rank's part of one MLP."""

    def __init__(self, model: ModelConfig, weights: MutableMapping[str, Tensor], name: str, ops: Ops):
        self._model, self._ops = model, ops
        self._gate_up = weights.pop(f"{name}.gate_up_proj.weight")
        self._down = weights.pop(f"{name}.down_proj.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, h] -> the rank's partial sum, [T, h]."""
        inner = self._ops.situ_mul(F.linear(x, self._gate_up), self._model.situ_beta, self._model.situ_linear_beta)
        return F.linear(inner, self._down)


class DenseFfn:
    """The FFN of a dense layer."""

    def __init__(self, model: ModelConfig, weights: MutableMapping[str, Tensor], name: str, tp: TensorParallel, ops: Ops):
        self._mlp, self._tp = Mlp(model, weights, name, ops), tp

    def __call__(self, x: Tensor, write_slots: Tensor, mode: str) -> Tensor:
        """x [T, h], normed -> [T, h], reduced over TP. Padding rows and the mode make no difference here."""
        return self._tp.all_reduce(self._mlp(x))
