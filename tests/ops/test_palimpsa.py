"""What makes Palimpsa what it is: the identities of the paper, the posterior by sampling, extremes, memory."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from fastweights.ops import linear_attention, palimpsa, palimpsa_posterior
from fastweights.testing import CASES, OpInputs

CASE, POSTERIOR = CASES["palimpsa"], CASES["palimpsa_posterior"]
BACKENDS = ["reference", "torch"]
inside = sys.modules["fastweights.ops.palimpsa.inside"]  # the name ops.palimpsa is the function


def draw(changed: dict[str, Tensor] | None = None, **sizes: int) -> dict[str, Tensor]:
    return {**CASE.draw(**sizes).arguments(), **(changed or {})}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gain_it_is_gated_linear_attention(backend: str) -> None:
    inputs = draw(time=150)
    prior, beta = inputs.pop("prior"), inputs.pop("beta")
    wanted, S = linear_attention(**inputs, output_final_state=True, backend=backend)
    wanted = wanted / prior[:, None]
    errors = []
    for gain in (1e-2, 1e-4, 0.0):
        o, (M, J) = palimpsa(**inputs, beta=gain * beta, prior=prior, output_final_state=True, backend=backend)
        errors.append(float((o - wanted).norm() / wanted.norm()))
        assert torch.allclose(M, S, rtol=1e-12, atol=0)
        assert J.max() < 3 * gain or gain == 0 == J.abs().max()
    assert errors[0] < 1e-2 and errors[1] < 1.1e-2 * errors[0]  # linear in the gain
    assert errors[2] < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_papers_importance_and_mean(backend: str) -> None:
    """Palimpsa, eq. 28 and 29, as printed: importance I and mean mu, values v with v* = beta * v."""
    inputs = draw(time=90)
    q, k, v, beta, g, prior = (inputs[name] for name in ("q", "k", "v", "beta", "g", "prior"))
    importance = prior[:, None, None].expand(2, 2, 8, 6)
    mean, wanted = torch.zeros(2, 2, 8, 6, dtype=torch.float64), []
    for t in range(90):
        alpha, keys = g[:, t].exp()[..., None, None], k[:, t, :, :, None]
        before = importance
        importance = alpha * before + (1 - alpha) * prior[:, None, None] + keys**2 * beta[:, t, :, None]
        mean = alpha * before / importance * mean + keys * (beta * v)[:, t, :, None] / importance
        wanted.append(torch.einsum("bhk,bhkv->bhv", q[:, t], mean))
    o, (M, J) = palimpsa(**{**inputs, "v": beta * v}, scale=1.0, output_final_state=True, backend=backend)
    torch.testing.assert_close(o, torch.stack(wanted, 1), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(J + prior[:, None, None], importance, rtol=1e-12, atol=0)
    torch.testing.assert_close(M, importance * mean, rtol=1e-11, atol=1e-12)


def test_mean_and_variance_are_those_of_sampled_memories() -> None:
    """Memories drawn from the posterior that the state holds, read by the last query."""
    inputs = draw(batch=1, time=70)
    o, variance, (M, J) = palimpsa_posterior(**inputs, scale=0.7, output_final_state=True)
    importance = J + inputs["prior"][:, None, None]
    samples = 40_000
    noise = torch.randn(samples, *M.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answers = torch.einsum("hk,shkv->shv", 0.7 * inputs["q"][0, -1], M / importance + noise * importance.rsqrt())
    error = (answers.mean(0) - o[0, -1]) / (variance[0, -1] / samples).sqrt()
    assert error.abs().max() < 4.5
    ratio = answers.var(0) / variance[0, -1]
    assert (ratio - 1).abs().max() < 4.5 * math.sqrt(2 / samples)


def test_with_one_key_channel_the_posterior_is_bayes_rule() -> None:
    """Memories drawn from the prior and weighted by the likelihood of every value, each discounted by the decay since."""
    generator = torch.Generator().manual_seed(0)
    T, samples = 6, 400_000
    k, v, g = (torch.randn(1, T, 1, 1, generator=generator, dtype=torch.float64) for _ in range(3))
    beta, g = torch.full_like(v, 0.8), -0.3 * g[..., 0].abs()
    memories = torch.randn(samples, generator=generator, dtype=torch.float64) / math.sqrt(0.5)
    left = (g.sum() - g.cumsum(1)).exp().flatten()
    log_likelihood = -0.5 * 0.8 * (memories[:, None] * k.flatten() - v.flatten()) ** 2
    weights = (log_likelihood @ left).softmax(0)
    mean = weights @ memories
    o, variance, _ = palimpsa_posterior(torch.ones_like(k), k, beta * v, beta, g, prior=0.5, scale=1.0)
    assert abs(mean - o[0, -1].item()) < 5e-3
    assert abs(weights @ (memories - mean) ** 2 / variance[0, -1].item() - 1) < 2e-2


@pytest.mark.parametrize("loss", ["o", "variance", "M", "J"])
def test_gradient_of_one_result_alone(loss: str) -> None:
    inputs = POSTERIOR.draw(time=70).map(lambda x: x.requires_grad_())
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]

    def gradients(backend: str) -> tuple[Tensor, ...]:
        o, variance, (M, J) = palimpsa_posterior(**inputs.arguments(), output_final_state=True, backend=backend)
        result = {"o": o, "variance": variance, "M": M, "J": J}[loss]
        return torch.autograd.grad(result.cos().sum(), leaves, materialize_grads=True)

    for got, wanted in zip(gradients("torch"), gradients("reference")):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    assert sum(float(x.abs().sum()) > 0 for x in gradients("torch")) >= 3


@pytest.mark.parametrize(("bounds", "states"), [(1, 1), (8 * 48 * 3, 8 * 48 * 5), (8 * 48 * 2, 8 * 48)])
def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, bounds: int, states: int) -> None:
    """Chunks and sub-chunks are worked off in blocks, here small ones that do not divide their number."""
    inputs = POSTERIOR.draw(time=200).map(lambda x: x.requires_grad_())
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]

    def results() -> list[Tensor]:
        o, (M, J) = POSTERIOR(inputs, backend="torch")
        return [o, M, J, *torch.autograd.grad(o.sin().sum(), leaves)]

    whole = results()
    monkeypatch.setattr(inside, "BOUNDS", bounds)
    monkeypatch.setitem(inside.STATES, "cpu", states)
    for got, wanted in zip(results(), whole):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_backward_keeps_no_state_of_a_token() -> None:
    """What is kept for the backward is a few times the inputs, far below K x V numbers per token and state."""
    inputs = CASE.draw(batch=1, time=1024, heads=1, key=64, value=64, dtype=torch.float32)
    inputs = inputs.map(lambda x: x.requires_grad_())
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o, _ = CASE(inputs, backend="torch")
    given = sum(x.numel() * x.element_size() for x in inputs.tokens.values())
    one_state_a_token = 4 * 1024 * 64 * 64
    assert given < sum(kept.values()) < 6 * given < 0.4 * one_state_a_token


def test_backward_inside_a_chunk_ignores_autocast() -> None:
    """One chunk and no final state: all products of the backward are those written by hand."""
    inputs = CASE.draw(time=60, dtype=torch.float32).map(lambda x: x.requires_grad_())
    leaves = list(inputs.tokens.values())
    plain = torch.autograd.grad(palimpsa(**inputs.arguments())[0].sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.autograd.grad(palimpsa(**inputs.arguments())[0].sum(), leaves)
    assert all(torch.equal(got, wanted) for got, wanted in zip(cast, plain))


def test_very_long_sequence_in_float32() -> None:
    inputs = CASE.draw(batch=1, heads=1, time=65_536, key=8, value=8, dtype=torch.float32)
    inputs = inputs.map(lambda x: x.requires_grad_())
    o, (M, J) = CASE(inputs)
    gradients = torch.autograd.grad(o.square().sum() + M.sum() + J.sum(), list(inputs.tokens.values()))
    assert all(x.isfinite().all() for x in (o, M, J, *gradients))
    assert J.min() >= 0


@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_one_key_ten_thousand_times(decay: float) -> None:
    """Mean k v* n / (k^2 beta n + p) with n tokens, or the sum of the decays, remembered."""
    T, prior, beta = 10_000, 0.7, 0.4
    k, v = torch.tensor([0.6, -0.8, 0.0, 0.01]), torch.tensor([1.0, -2.0, 3.0])
    q = torch.ones(1, T, 1, 4)
    g = torch.full((1, T, 1), math.log(decay))
    keys, values = k.expand(1, T, 1, 4), v.expand(1, T, 1, 3)
    gains = torch.full((1, T, 1, 3), beta)
    o, variance, _ = palimpsa_posterior(q, keys, values, gains, g, prior=prior, scale=1.0)
    steps = torch.arange(1, T + 1, dtype=torch.float64)[:, None, None]
    n = steps if decay == 1 else (1 - decay**steps) / (1 - decay)
    k64, v64 = k.double()[:, None], v.double()
    importance = n * k64**2 * beta + prior
    torch.testing.assert_close(o[0, :, 0].double(), (n * k64 * v64 / importance).sum(1), rtol=2e-4, atol=2e-4)
    wanted = (1 / importance).sum(1).expand(T, 3)
    torch.testing.assert_close(variance[0, :, 0].double(), wanted, rtol=2e-4, atol=0)


def test_decay_zero_leaves_the_last_token_alone() -> None:
    inputs = draw(time=20)
    inputs["g"] = torch.full_like(inputs["g"], -math.inf).requires_grad_()
    o, (M, J) = palimpsa(**inputs, output_final_state=True)
    k, v, beta, prior = (inputs[name] for name in ("k", "v", "beta", "prior"))
    alone = k[..., None] * v[..., None, :] / (k.square()[..., None] * beta[..., None, :] + prior[:, None, None])
    torch.testing.assert_close(o, torch.einsum("bthk,bthkv->bthv", inputs["q"], alone) * 8**-0.5)
    torch.testing.assert_close(J, k[:, -1, :, :, None].square() * beta[:, -1, :, None])
    assert torch.autograd.grad(o.sum(), inputs["g"])[0].abs().max() == 0


def test_unwritten_memory_answers_with_the_prior() -> None:
    inputs = draw(time=20)
    inputs["k"] = torch.zeros_like(inputs["k"])
    o, variance, (M, J) = palimpsa_posterior(**inputs, scale=1.0, output_final_state=True)
    assert o.abs().max() == 0 == M.abs().max() and J.abs().max() == 0
    wanted = inputs["q"].square().sum(-1, keepdim=True) / inputs["prior"][:, None]
    torch.testing.assert_close(variance, wanted.expand_as(variance))


def test_prior_is_a_number_or_one_a_head() -> None:
    inputs = draw(time=9, value_heads=4)
    inputs["prior"] = 1.75
    number, _ = palimpsa(**inputs)
    for prior in (torch.tensor(1.75), torch.full((2,), 1.75), torch.full((4,), 1.75, dtype=torch.float64)):
        assert torch.equal(palimpsa(**{**inputs, "prior": prior})[0], number)
    by_key_head, _ = palimpsa(**{**inputs, "prior": torch.tensor([1.0, 2.0])})
    by_value_head, _ = palimpsa(**{**inputs, "prior": torch.tensor([1.0, 1.0, 2.0, 2.0])})
    assert torch.equal(by_key_head, by_value_head) and not torch.equal(by_key_head, number)


def test_gains_may_be_more_precise_than_values() -> None:
    low = CASE.draw(dtype=torch.bfloat16)
    gates = {name: low.tokens[name].float() for name in ("beta", "g")}
    mixed = OpInputs({**low.tokens, **gates}, {"prior": low.parameters["prior"].float()})
    o, (M, _) = CASE(mixed)
    assert o.dtype == torch.bfloat16 and M.dtype == torch.float32
    assert torch.equal(o, CASE(low)[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prior": 0.0}, "prior must be a finite number, more than 0"),
        ({"prior": torch.tensor([1.0, -1.0])}, "prior must be positive"),
        ({"prior": torch.tensor([1.0, math.nan])}, "prior must be positive"),
        ({"prior": torch.ones(3)}, r"prior must be a number or of shape \[2\]"),
        ({"beta": -torch.ones(2, 5, 2, 6)}, "beta must be at least 0, got -1 at its smallest"),
        ({"beta": torch.ones(2, 5, 2)}, "beta must have shape"),
        ({"beta": torch.ones(2, 5, 2, 8)}, "beta must have shape"),
    ],
)
@pytest.mark.parametrize("op", [palimpsa, palimpsa_posterior])
def test_refusals(op, changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(**draw(changed, time=5))


def test_decay_is_needed() -> None:
    with pytest.raises(TypeError, match="g must be a"):
        palimpsa(**{**draw(time=5), "g": None})
