"""Both KDA states moved on by a verify round's accepted rows (spec speculation §8): the convolution, then the recurrence."""

from torch import Tensor

from kernels.triton_ops import kda_scan, short_conv


def kda_commit(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
) -> None:
    qkv = short_conv.run(qkv, conv_weight, conv_state, slots, cu_seqlens, update=True, accepted=accepted)
    q, k, v = qkv.unflatten(-1, (3, *decay.shape[1:])).unbind(1)
    kda_scan.run(q, k, v, decay, beta, a_log, dt_bias, lower_bound, state, slots, cu_seqlens, accepted=accepted)
