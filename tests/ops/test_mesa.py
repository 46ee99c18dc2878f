"""The Mesa layer: against least squares, its gradient, conjugate gradients where they could break."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import gated_kalmanet, mesa, recursive_least_squares
from fastweights.ops.shared.ridge.iterations import conjugate_gradient
from fastweights.testing import CASES

BACKENDS = ("reference", "torch")


def draw(**sizes: Any) -> dict[str, Tensor]:
    inputs = CASES["mesa"].draw(**sizes)
    return {**inputs.tokens, **inputs.parameters}


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def matrices(seed: int, condition: float, size: int = 12, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Symmetric matrices with eigenvalues spread over [1/condition, 1], and right-hand sides."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(rows, size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    return basis * values @ basis.mT, torch.randn(rows, size, generator=generator, dtype=torch.float64)


def solve(A: Tensor, b: Tensor, iterations: int) -> Tensor:
    return conjugate_gradient(lambda x: (A @ x[..., None])[..., 0], b, iterations)


# The rule


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_decay_it_is_recursive_least_squares(backend: str) -> None:
    inputs = draw(time=90)
    inputs.pop("ridge")
    g = torch.zeros_like(inputs.pop("g"))
    wanted, _ = recursive_least_squares(**inputs, ridge=0.7, backend=backend)
    o, _ = mesa(**inputs, g=g, ridge=0.7, iterations=30, backend=backend)
    assert relative(o, wanted) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_answer_is_that_of_the_weighted_ridge_regression(backend: str) -> None:
    """The memory whose answers o_t are minimises sum_s a(s, t] beta_s |S^T k_s - v_s|^2 + sum_i ridge_i |s_i|^2."""
    inputs = draw(batch=1, time=20, heads=1)
    k, v, g, beta = (inputs[name][0, :, 0] for name in ("k", "v", "g", "beta"))
    weights = ((g.sum() - g.cumsum(0)).exp() * beta)[:, None]
    every_query = {name: inputs[name].expand(8, *inputs[name].shape[1:]) for name in ("k", "v", "g", "beta")}
    q = torch.eye(8, dtype=torch.float64)[:, None, None].expand(8, 20, 1, 8)
    o, _ = mesa(q, **every_query, ridge=inputs["ridge"], scale=1.0, backend=backend)
    S = o[:, -1, 0].requires_grad_()
    loss = (weights * (k @ S - v).square()).sum() + (inputs["ridge"][0, :, None] * S.square()).sum()
    (slope,) = torch.autograd.grad(loss, S)
    assert slope.abs().max() < 1e-12 < 1e-2 < S.abs().max()


def test_ridge_may_be_a_number_or_one_a_head() -> None:
    inputs = draw(time=20)
    inputs.pop("ridge")
    number, _ = mesa(**inputs, ridge=0.4)
    for ridge in (torch.full((2,), 0.4), torch.full((2, 8), 0.4, dtype=torch.float64), torch.tensor(0.4)):
        assert relative(mesa(**inputs, ridge=ridge)[0], number) < 1e-7


@pytest.mark.parametrize("backend", BACKENDS)
def test_ridges_of_key_heads_serve_their_value_heads(backend: str) -> None:
    inputs = draw(time=20, heads=2, value_heads=6)
    inputs["ridge"] = inputs["ridge"][::3]
    o, _ = mesa(**inputs, backend=backend)
    inputs["ridge"] = inputs["ridge"].repeat_interleave(3, 0)
    assert torch.equal(o, mesa(**inputs, backend=backend)[0])


def test_gradients_are_those_of_the_exact_solution_once_converged() -> None:
    inputs = {name: x.requires_grad_() for name, x in draw(batch=1, time=20, heads=1, key=5).items()}
    q, k, v, g, beta, ridge = (inputs[name] for name in ("q", "k", "v", "g", "beta", "ridge"))
    H, U, answers = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64), []
    for t in range(20):
        key = beta[0, t, 0] * k[0, t, 0][:, None]
        H = g[0, t, 0].exp() * H + key * k[0, t, 0]
        U = g[0, t, 0].exp() * U + key * v[0, t, 0]
        answers.append(U.T @ torch.linalg.solve(H + torch.diag(ridge[0]), q[0, t, 0]))
    wanted = torch.stack(answers)
    wanted_gradients = torch.autograd.grad(wanted.square().sum(), list(inputs.values()))
    o, _ = mesa(**inputs, scale=1.0, iterations=15)
    assert relative(o[0, :, 0], wanted) < 1e-12
    for got, exact in zip(torch.autograd.grad(o.square().sum(), list(inputs.values())), wanted_gradients):
        assert relative(got, exact) < 1e-11


# Conjugate gradients


def test_as_many_steps_as_channels_are_exact() -> None:
    A, b = matrices(0, condition=50.0)
    errors = [relative(solve(A, b, n), torch.linalg.solve(A, b)) for n in (3, 6, 12)]
    assert errors[0] > errors[1] > 1e-4 and errors[2] < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_after_the_solution_leave_it_alone(dtype: torch.dtype) -> None:
    """A residual of zero divides nothing: at once, after one step, and after hundreds that reach the smallest numbers."""
    A, b = (x.to(dtype) for x in matrices(1, condition=50.0))
    exact = torch.linalg.solve(A.double(), b.double())
    for iterations in (20, 300, 2000):
        assert relative(solve(A, b, iterations), exact) < 50 * 50 * torch.finfo(dtype).eps
    b[2] = 0
    assert not solve(A, b, 50)[2].any() and solve(A, b, 50).isfinite().all()
    identity = 3 * torch.eye(12, dtype=dtype).expand(5, 12, 12)
    torch.testing.assert_close(solve(identity, b, 50), b / 3)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_solution_scales_with_the_right_hand_side(size: float) -> None:
    """The squares of small gradients would underflow in float32."""
    A, b = (x.float() for x in matrices(2, condition=50.0))
    assert relative(solve(A, size * b, 20) / size, solve(A, b, 20)) < 1e-5


def test_not_a_number_stays_one() -> None:
    A, b = matrices(3, condition=50.0)
    A[1, 2, 3] = math.nan
    x = solve(A, b, 12)
    assert x[1].isnan().all() and x[0].isfinite().all() and x[2:].isfinite().all()


# Inputs at their limits


def test_keys_or_gains_that_are_zero_give_zeros() -> None:
    for name in ("k", "beta"):
        for backend in BACKENDS:
            inputs = {key: x.float() for key, x in draw(time=20).items()}
            inputs[name] = torch.zeros_like(inputs[name])
            leaves = {key: x.requires_grad_() for key, x in inputs.items()}
            o, (H, U) = mesa(**leaves, backend=backend, output_final_state=True)
            assert not o.any() and not H.any() and not U.any()
            assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


def test_one_key_ten_thousand_times() -> None:
    """H = n k k^T: what is read at k is sum v / (n + ridge)."""
    k = torch.zeros(1, 10_000, 1, 4)
    k[..., 1] = 1.0
    v = torch.randn(1, 10_000, 1, 2, generator=torch.Generator().manual_seed(0))
    ridge = torch.tensor([[0.3, 0.5, 0.7, 0.9]])
    o, _ = mesa(k, k, v, torch.zeros(1, 10_000, 1), torch.ones(1, 10_000, 1), ridge, scale=1.0)
    wanted = v.double().cumsum(1) / (torch.arange(1, 10_001)[:, None, None] + 0.5)
    assert (o - wanted).abs().max() < 1e-4


def test_one_dominant_direction() -> None:
    """Keys a hundred times longer in one direction, condition numbers of 1e5: float32 keeps what it can."""
    inputs = draw(time=130)
    inputs["k"][..., 0] *= 1e2
    wanted, _ = mesa(**inputs, iterations=60, backend="reference")
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    o, _ = mesa(**leaves)
    assert relative(o, wanted) < 1e-2
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


def test_decay_0_leaves_only_the_current_token() -> None:
    inputs = draw(time=70)
    q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
    inputs["g"] = torch.full_like(inputs["g"], -math.inf)
    inverse = 1 / inputs["ridge"]
    score = beta * (k * inverse * q).sum(-1) / (1 + beta * (k * inverse * k).sum(-1))  # Sherman and Morrison
    torch.testing.assert_close(mesa(**inputs, scale=1.0)[0], score[..., None] * v, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_long_sequence_stays_finite() -> None:
    inputs = draw(batch=1, time=65_536, heads=1, key=4, value=3, dtype=torch.float32)
    inputs["g"] = inputs["g"] / 1000
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = mesa(**leaves)
    assert o.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


def test_its_state_is_that_of_gated_kalmanet_without_gain() -> None:
    """One computation serves both: a state of one continues the other."""
    inputs = draw(time=20)
    inputs["beta"] = torch.ones_like(inputs["beta"])
    _, mine = mesa(**inputs, output_final_state=True)
    inputs.pop("beta"), inputs.pop("ridge")
    _, other = gated_kalmanet(**inputs, output_final_state=True)
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ridge": -torch.ones(2, 8)}, ValueError, "ridge must be positive"),
        ({"ridge": torch.ones(3, 8)}, ValueError, r"ridge must be a number, \[2\] or \[2, 8\]"),
        ({"ridge": 0.0}, ValueError, "ridge must be a finite number, more than 0"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"beta": torch.full((2, 5, 2), -0.5)}, ValueError, "beta must be at least 0, got -0.5 at its smallest"),
        ({"beta": None}, TypeError, "beta must be a torch.Tensor"),
        ({"g": None}, TypeError, "g must be a torch.Tensor"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mesa(**{**draw(time=5), **options})
