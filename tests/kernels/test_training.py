"""Training's parts against the definitions that serving uses."""

import torch

from kernels.reference.kda import kda_scan as reference_scan
from kernels.reference.mxfp4 import dequantize
from tests.lib.golden import relative_error
from training.acceptance import accepted
from training.kda import CHUNK, StateScan, kda_scan
from training.mxfp4 import fake_quantize, pack


def test_the_chunked_scan_equals_the_recurrence():
    torch.manual_seed(0)
    batch, tokens, heads, dim = 2, 3 * CHUNK + 5, 3, 32
    q, k, v, f = (torch.randn(batch, tokens, heads, dim) for _ in range(4))
    beta, a_log, dt_bias = torch.randn(batch, tokens, heads), torch.randn(heads) * 0.5, torch.randn(heads, dim)
    expected = reference_scan(
        *(x.flatten(0, 1) for x in (q, k, v, f, beta)), a_log, dt_bias, -5.0, torch.zeros(batch + 1, heads, dim, dim),
        torch.tensor([1, 2]), torch.tensor([True, True]), torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32),
    ).view(batch, tokens, heads, dim)  # fmt: skip
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    log_decay = -5 * torch.sigmoid(a_log.exp()[:, None] * (f + dt_bias))
    assert relative_error(kda_scan(q * dim**-0.5, k, v, log_decay, beta.sigmoid()), expected) < 1e-5


def test_the_scan_is_finite_at_the_strongest_decay():
    ones = torch.full((1, CHUNK, 1, 32), 32**-0.5)
    out = kda_scan(ones, ones, ones, torch.full_like(ones, -5.0), torch.ones(1, CHUNK, 1))
    assert out.isfinite().all()


def test_the_scan_s_gradient_is_that_of_its_formula():
    torch.manual_seed(0)
    inputs = [(torch.randn(3, 2, 4, 5, dtype=torch.float64) * 0.3).requires_grad_() for _ in range(3)]
    decay = torch.rand(3, 2, 5, 1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(StateScan.apply, (*inputs, decay))


def test_packed_experts_are_the_values_that_were_trained():
    torch.manual_seed(0)
    weight = torch.randn(4, 8, 64) * torch.logspace(-3, 2, 4)[:, None, None]
    trained = fake_quantize(weight)
    read = dequantize(*pack(weight), torch.float32)
    assert torch.allclose(trained, read, rtol=1e-6, atol=0)
    assert torch.equal(fake_quantize(read), read)  # a checkpoint that is read back stays as it is
    assert (read - weight).norm() / weight.norm() < 0.15


def test_rounds_are_counted_from_anchor_to_anchor():
    tokens = torch.tensor([[9, 9, 1, 2, 3, 4, 5, 6, 0, 0]])  # prompt of two, then six tokens and the end
    following = torch.stack([tokens.roll(-k - 1, 1) for k in range(3)], -1)
    wrong = following.clone()
    wrong[0, 3, 1] = 7  # after the token at 3: one right proposal, then a wrong one
    perfect = accepted(tokens, torch.tensor([2]), torch.tensor([8]), following)
    assert perfect.rounds == [4, 1]  # positions 2 to 6, then what is left
    assert accepted(tokens, torch.tensor([3]), torch.tensor([8]), wrong).rounds == [2, 2]
    cut = accepted(tokens[:, :8], torch.tensor([2]), torch.tensor([8]), following[:, :8])
    assert cut.rounds == [4]  # the text may go on: its last round is not known
