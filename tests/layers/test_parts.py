"""The pieces that layers share: convolution, decays, gates, norms, rotary positions."""

import math

import pytest
import torch

from fastweights.layers.attention import rotate, rotation
from fastweights.layers.decay import GLADecay, HeadDecay, KimiDecay
from fastweights.layers.gates import PreconditionerGates, SigmoidGain
from fastweights.layers.norms import RMSNorm, l2_normalize
from fastweights.layers.projections import ShortConvolution


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(10,), (3, 7), (1, 0, 9), (1,) * 10])
def test_convolution_of_packed_sequences_with_windows(width, lengths):
    torch.manual_seed(0)
    convolution = ShortConvolution(5, width).double()
    x, windows = torch.randn(1, 10, 5, dtype=torch.double), torch.randn(len(lengths), width - 1, 5, dtype=torch.double)
    y, after = convolution(x, windows, torch.tensor([0, *lengths]).cumsum(0))
    for n, (part, result) in enumerate(zip(x[0].split(lengths), y[0].split(lengths), strict=True)):
        seen = torch.cat([windows[n], part])
        wanted = [(seen[t : t + width] * convolution.weight.T).sum(0) for t in range(len(part))]
        torch.testing.assert_close(result, torch.stack(wanted) if wanted else part)
        torch.testing.assert_close(after[n], seen[len(seen) - width + 1 :])


def test_convolution_adds_its_bias():
    convolution, x = ShortConvolution(3, 2, bias=True), torch.randn(1, 4, 3)
    without, bias = convolution(x)[0], torch.tensor([1.0, 2.0, 3.0])
    assert not convolution.bias.any()
    convolution.bias.data.copy_(bias)
    for edges in (None, torch.tensor([0, 4])):
        torch.testing.assert_close(convolution(x, cu_seqlens=edges)[0], without + bias)


def test_own_first_decays_are_those_of_mamba2():
    torch.manual_seed(0)
    gate = HeadDecay(8, 4000, "own")
    rate, step = gate.A_log.exp(), torch.nn.functional.softplus(gate.dt_bias)
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() < 16 and abs(rate.mean() - 8) < 0.3
    assert 0.00099 < step.min() < 0.0011 and 0.09 < step.max() < 0.1001
    assert abs(step.log().mean() - (math.log(1e-3) + math.log(1e-1)) / 2) < 0.1
    torch.testing.assert_close(gate(torch.zeros(1, 1, 8))[0, 0], -rate * step)


def test_own_first_decays_of_kimi_have_one_rate_a_head():
    torch.manual_seed(0)
    gate = KimiDecay(8, 500, 6, "own")
    assert gate.A_log.shape == (500,) and gate.dt_bias.shape == (3000,)
    assert 1 <= gate.A_log.exp().min() < 1.3 and 15.5 < gate.A_log.exp().max() < 16
    assert gate(torch.zeros(2, 3, 8)).shape == (2, 3, 500, 6)


@pytest.mark.parametrize("gate", [HeadDecay(8, 3), KimiDecay(8, 3, 4), GLADecay(8, 3, 4)])
def test_decays_are_float32_and_at_most_zero(gate):
    g = gate.bfloat16()(50 * torch.randn(2, 7, 8, dtype=torch.bfloat16))
    assert g.dtype == torch.float32 and g.max() <= 0 and g.isfinite().all()
    assert gate.double()(torch.randn(1, 1, 8).double()).dtype == torch.float64


def test_gain_reaches_its_largest_value():
    gain = SigmoidGain(1, 1, largest=2.0)
    gain.b_proj.weight.data.fill_(1.0)
    beta = gain(torch.tensor([[[-50.0], [0.0], [50.0]]]))
    torch.testing.assert_close(beta.flatten(), torch.tensor([0.0, 1.0, 2.0]))


def test_tied_preconditioner_has_no_parameters_of_its_own():
    gates, beta = PreconditionerGates(8, 2, tied=True), torch.rand(1, 3, 2)
    assert list(gates.parameters()) == []
    assert gates.own == ()
    g, same = gates((), None, beta)
    assert same is beta and g.shape == beta.shape and not g.any()


def test_l2_normalize():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=torch.double, requires_grad=True)
    y = l2_normalize(x)
    torch.testing.assert_close(y[0], torch.tensor([0.6, 0.8], dtype=torch.double), rtol=0, atol=1e-7)
    torch.testing.assert_close(y[2, 0].item(), 1e-3 / math.sqrt(2e-6))
    assert not y[1].any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    assert l2_normalize(x.bfloat16()).dtype == torch.bfloat16


def test_rms_norm_keeps_the_dtype_of_its_input():
    norm, x = RMSNorm(6, eps=1e-6), torch.randn(4, 6)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-6))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def rotated(x, place, theta):
    return rotate(x, *rotation(torch.tensor([[place]]), x.shape[3], theta, x.dtype))


def test_rotation_depends_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.double), torch.randn(1, 1, 1, 8, dtype=torch.double)

    def score(i, j):
        return (rotated(q, i, 100.0) * rotated(k, j, 100.0)).sum()

    torch.testing.assert_close(score(7, 3), score(14, 10), rtol=1e-5, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    torch.testing.assert_close(rotated(q, 0, 100.0), q)


def test_rotation_turns_pairs_of_channels():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    turned = rotated(x, 3, 16.0).flatten()  # angles 3 and 3/4
    wanted = [math.cos(3), -math.sin(0.75), math.sin(3), math.cos(0.75)]
    torch.testing.assert_close(turned, torch.tensor(wanted))
