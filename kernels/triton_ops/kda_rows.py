"""What KDA's kernels share: one head's recurrence (spec k3-model §6) over one row, and over a few rows at once.

Over a few rows, with G_t the product of the decays up to row t, the recurrence S_t = D_t S_(t-1) + k_t e_t^T with
e_t = beta_t (v_t - (D_t S_(t-1))^T k_t) unrolls to

    e_t + beta_t sum_(s<t) A_ts e_s = beta_t (v_t - S_0^T (G_t k_t))        A_ts = sum_d k_t[d] k_s[d] G_t[d] / G_s[d]
    o_t = S_0^T (G_t q_t) + sum_(s<=t) B_ts e_s                             B_ts = sum_d q_t[d] k_s[d] G_t[d] / G_s[d]
    S_n = G_n S_0 + sum_s (k_s G_n / G_s) e_s^T

so the state is read once, in matrix products, and what is sequential is a triangle of ROWS x ROWS. A row's decay is at least
exp(-5), so 16 rows stay within float32 when G_t and 1 / G_s are formed apart.
"""

import triton
import triton.language as tl

ROWS = 16  # a matrix product's least, and a window's most


@triton.jit
def unit(x, axis: tl.constexpr):
    """x divided by its length."""
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, axis) + 1e-6), axis)


@triton.jit
def log_decay(raw, a_log, dt_bias, lower_bound):
    """Raw decay [..., D] -> its logarithm, in (lower_bound, 0)."""
    return lower_bound * tl.sigmoid(tl.exp(a_log) * (raw + dt_bias))


@triton.jit
def triangle(kg, ki, rate, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + beta A)^-1 of rows below WIDTH, [ROWS, ROWS], from kg = k G and ki = k / G, [ROWS, D]: by forward substitution."""
    t, s = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    below = tl.where(t > s, tl.dot(kg, tl.trans(ki), input_precision=PRECISION) * rate[:, None], 0.0)
    inverse = tl.where(t == s, 1.0, 0.0)
    for row in tl.static_range(1, WIDTH):
        mine = tl.sum(tl.where(t == row, below, 0.0), 0)  # [s]: row `row` of the triangle
        update = tl.sum(mine[:, None] * inverse, 0)
        inverse = tl.where(t == row, inverse - update[None, :], inverse)
    return inverse
