"""Gated KalmaNet: the lemmas of the paper, the solvers against each other, the gradient, and inputs at their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import gated_kalmanet, linear_attention
from fastweights.ops.shared.ridge.iterations import chebyshev_weights
from fastweights.ops.shared.ridge.system import ridge_and_norm
from fastweights.testing import CASES
from fastweights.testing.unrolled import unrolled_solutions
from tests.fast_set import fast_where

SOLVERS = ("chebyshev", "conjugate_gradient", "exact")
POLYNOMIALS = ("chebyshev", "gradient_descent", "accelerated_gradient_descent")
BACKENDS = ("reference", "torch")
RIDGE = 0.02
CONDITION = (1 + RIDGE) / RIDGE
CONVERGED: dict[str, dict[str, Any]] = {
    "chebyshev": {"solver": "chebyshev", "iterations": 120},
    "conjugate_gradient": {"solver": "conjugate_gradient", "iterations": 16},
    "exact": {"solver": "exact"},
}


def draw(**sizes: Any) -> dict[str, Tensor]:
    return dict(CASES["gated_kalmanet-exact"].draw(**sizes).tokens)


def solutions(q: Tensor, k: Tensor, g: Tensor, **keywords: Any) -> Tensor:
    """x_t: what is read from a memory that begins as the identity, is written nothing and only fades."""
    B, _, H, K = q.shape
    identity = torch.eye(K, dtype=q.dtype).expand(B, H, K, K)
    o, _ = gated_kalmanet(
        q, k, torch.zeros_like(k), g, scale=1.0, initial_state=(torch.zeros_like(identity), identity), **keywords
    )
    return o / g.cumsum(1).exp()[..., None]


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


# The Chebyshev iteration


def values_and_gradients_in_q(key: int = 8, time: int = 70, **options: Any) -> list[list[Tensor]]:
    """[x, gradient in q] of the op and of its unrolled twin."""
    inputs = draw(batch=1, time=time, heads=1, key=key)
    q, k, g = inputs["q"].requires_grad_(), inputs["k"], inputs["g"]
    backend = options.pop("backend", "torch")
    both = solutions(q, k, g, backend=backend, **options), unrolled_solutions(q, k, g, **options)
    return [[x, *torch.autograd.grad(x.square().sum(), q)] for x in both]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adaptive_ridge", [True, False])
@pytest.mark.parametrize("solver", POLYNOMIALS)
@pytest.mark.parametrize("iterations", [1, 4, 30])
def test_lemma_2_the_gradient_in_q_is_that_of_the_unrolled_iteration(
    iterations: int, solver: str, adaptive_ridge: bool, backend: str
) -> None:
    """An iteration between fixed bounds is a polynomial of a symmetric matrix times q, at any number of steps."""
    got, wanted = values_and_gradients_in_q(
        iterations=iterations, solver=solver, adaptive_ridge=adaptive_ridge, ridge=0.05, backend=backend
    )
    assert relative(got[0], wanted[0]) < 1e-12
    assert relative(got[1], wanted[1]) < 1e-12


@pytest.mark.parametrize("iterations", [3, 10, 30])
def test_lemma_2_holds_for_chebyshev_and_not_for_conjugate_gradients(iterations: int) -> None:
    """The steps of conjugate gradients depend on q. The paper's claim at its size, with a case that must fail."""
    got, wanted = values_and_gradients_in_q(key=32, iterations=iterations)
    assert relative(got[1], wanted[1]) < 1e-11
    got, wanted = values_and_gradients_in_q(key=32, iterations=3, solver="conjugate_gradient")
    assert relative(got[0], wanted[0]) < 1e-11 and relative(got[1], wanted[1]) > 1e-2


def test_solvers_between_bounds_differ_in_speed() -> None:
    """The paper's figure 1a: Chebyshev before Nesterov before gradient descent, from the same interval of eigenvalues."""
    inputs = draw(batch=1, time=100, heads=1, key=32)
    q, k, g = inputs["q"], inputs["k"], torch.zeros_like(inputs["g"])
    exact = solutions(q, k, g, solver="exact")
    errors = [relative(solutions(q, k, g, solver=solver, iterations=30), exact) for solver in POLYNOMIALS]
    assert errors[0] < errors[2] / 3 < errors[1] / 10


@fast_where(lambda given: given["backend"] == "torch")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient", "exact", "accelerated_gradient_descent"])
def test_a_constant_ridge_is_what_is_solved_with(solver: str, backend: str) -> None:
    inputs = draw(time=70)
    mix, scale = inputs.pop("mix"), 8**-0.5
    keywords: dict[str, Any] = {"solver": solver, "iterations": 150, "backend": backend}
    o, (H, U) = gated_kalmanet(**inputs, mix=mix, ridge=0.25, adaptive_ridge=False, output_final_state=True, **keywords)
    q, m = scale * inputs["q"][:, -1], mix[:, -1, :, None]
    x = torch.linalg.solve(H + 0.25 * torch.eye(8, dtype=torch.float64), q)
    wanted = torch.einsum("bhk,bhkv->bhv", m * x + (1 - m) * q, U)
    torch.testing.assert_close(o[:, -1], wanted, rtol=1e-9, atol=1e-11)
    adaptive, _ = gated_kalmanet(**inputs, mix=mix, ridge=0.25, **keywords)
    assert relative(o, adaptive) > 1e-2


@pytest.mark.parametrize("condition", [1.5, CONDITION, 1e4])
def test_lemmas_3_and_4_the_weights_fall_to_their_fixed_point(condition: float) -> None:
    rho = (condition - 1) / (condition + 1)
    fixed = 2 * (1 - math.sqrt(1 - rho**2)) / rho**2
    rate = rho * (math.sqrt(condition) - 1) / (math.sqrt(condition) + 1)
    weights = [2.0, *(float(w) for w in chebyshev_weights(torch.tensor(rho, dtype=torch.float64), 30))]
    assert len(weights) == 31 and fixed > 1
    for i, (before, now) in enumerate(zip(weights, weights[1:]), 1):
        assert before + 1e-12 >= now >= fixed - 1e-12
        assert 2 <= 4 - rho**2 * before <= 4
        assert now - fixed <= rate**i * (2 - fixed) + 1e-12


@pytest.mark.parametrize(("iterations", "error"), [(10, 9e-2), (20, 5e-3), (30, 3e-4)])
@pytest.mark.parametrize("g", [0.0, -0.05])
def test_convergence_on_unit_keys(iterations: int, error: float, g: float) -> None:
    """The error of the worst token is that of the Chebyshev polynomial, 1/T_(r+1)(1/rho)."""
    inputs = draw(batch=1, time=200, heads=1, key=32)
    q, k, decay = inputs["q"], inputs["k"], torch.full((1, 200, 1), g, dtype=torch.float64)
    x, exact = (solutions(q, k, decay, iterations=iterations, solver=s) for s in ("chebyshev", "exact"))
    worst = float(((x - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    bound = 1 / math.cosh((iterations + 1) * math.acosh((CONDITION + 1) / (CONDITION - 1)))
    assert bound == pytest.approx(error, rel=0.1)
    assert 0.9 * bound < worst < 1.001 * bound


@pytest.mark.parametrize("ridge", [0.005, 0.02, 0.3])
def test_condition_number_is_at_most_one_plus_ridge_over_ridge(ridge: float) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 40, 1, 8, generator=generator, dtype=torch.float64)
    one = 30 * noise[:, :1].expand_as(noise)
    k = torch.cat([noise, one + 1e-3 * noise, one])
    _, (H, _) = gated_kalmanet(k, k, k, torch.full((9, 40, 1), -0.1), ridge=ridge, output_final_state=True)
    added, _ = ridge_and_norm(ridge, True, H.square().sum((-1, -2))[..., None])
    values = torch.linalg.eigvalsh(H + added[..., None] * torch.eye(8))
    condition = values[..., -1] / values[..., 0]
    assert (condition <= (1 + ridge) / ridge * (1 + 1e-9)).all()
    assert (condition[6:] >= (1 + ridge) / ridge * (1 - 1e-6)).all()  # a single direction attains it


# The rule


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_mix_goes_from_linear_attention_to_the_regression(solver: str, backend: str) -> None:
    inputs = draw(time=70)
    mix = inputs.pop("mix")
    keywords: dict[str, Any] = {"solver": solver, "backend": backend}
    none, S = linear_attention(**inputs, output_final_state=True, backend=backend)
    o, (_, U) = gated_kalmanet(**inputs, mix=torch.zeros_like(mix), output_final_state=True, **keywords)
    torch.testing.assert_close((o, U), (none, S), rtol=1e-12, atol=1e-13)
    full, _ = gated_kalmanet(**inputs, **keywords)
    o, _ = gated_kalmanet(**inputs, mix=torch.ones_like(mix), **keywords)
    torch.testing.assert_close(o, full, rtol=1e-12, atol=1e-13)
    o, _ = gated_kalmanet(**inputs, mix=mix, **keywords)
    torch.testing.assert_close(o, mix[..., None] * full + (1 - mix[..., None]) * none, rtol=1e-11, atol=1e-12)


def test_the_answer_is_that_of_the_ridge_regression() -> None:
    """The memory whose answers o_t are minimises sum_s a(s, t] |S^T k_s - v_s|^2 + lambda_t |S|^2: its slope vanishes."""
    inputs = draw(batch=1, time=20, heads=1)
    k, v, g = (inputs[name][0, :, 0] for name in ("k", "v", "g"))
    weights = (g.sum() - g.cumsum(0)).exp()[:, None]
    ridge = RIDGE * torch.linalg.matrix_norm(k.T @ (weights * k))
    every_query = {name: inputs[name].expand(8, *inputs[name].shape[1:]) for name in ("k", "v", "g")}
    q = torch.eye(8, dtype=torch.float64)[:, None, None].expand(8, 20, 1, 8)
    S = gated_kalmanet(q, **every_query, solver="exact", scale=1.0)[0][:, -1, 0].requires_grad_()
    loss = (weights * (k @ S - v).square()).sum() + ridge * S.square().sum()
    (slope,) = torch.autograd.grad(loss, S)
    assert slope.abs().max() < 1e-12 < 1e-2 < S.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_solvers_agree_once_converged(backend: str) -> None:
    """Values and the gradients in everything, those of the states included."""
    inputs = draw(time=20, key=6)
    _, states = gated_kalmanet(**draw(time=9, key=6, seed=3), solver="exact", output_final_state=True)
    assert states is not None
    results = []
    for keywords in CONVERGED.values():
        leaves = {name: x.clone().requires_grad_() for name, x in {**inputs, "H": states[0], "U": states[1]}.items()}
        H, U = leaves.pop("H"), leaves.pop("U")
        o, (last, _) = gated_kalmanet(
            **leaves, initial_state=(H, U), output_final_state=True, backend=backend, **keywords
        )
        gradients = torch.autograd.grad(o.square().sum() + last.square().sum(), [*leaves.values(), H, U])
        results.append([o, *gradients])
    for other in results[:2]:
        for got, wanted in zip(other, results[2]):
            assert relative(got, wanted) < 1e-9


def test_implicit_gradients_are_those_of_the_unrolled_iteration_once_converged() -> None:
    """And before that not, but in q: see lemma 2."""
    inputs = draw(batch=1, time=20, heads=1, key=5)
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "g")]
    errors = {}
    for iterations in (5, 120):
        wanted = torch.autograd.grad(unrolled_solutions(*leaves, iterations=iterations).square().sum(), leaves)
        got = torch.autograd.grad(solutions(*leaves, iterations=iterations).square().sum(), leaves)
        errors[iterations] = [relative(a, b) for a, b in zip(got, wanted)]
    assert max(errors[120]) < 1e-9
    assert errors[5][0] < 1e-12 and min(errors[5][1:]) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_of_the_converged_chebyshev_iteration(backend: str) -> None:
    inputs = draw(batch=1, time=4, heads=1, key=3, value=2)
    names = list(inputs)
    _, states = gated_kalmanet(**inputs, output_final_state=True)
    assert states is not None

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        o, final = gated_kalmanet(
            **dict(zip(names, values)),
            initial_state=values[-2:],
            output_final_state=True,
            backend=backend,
            iterations=90,
        )
        return (o, *final)

    leaves = [x.clone().requires_grad_() for x in (*inputs.values(), *states)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, atol=1e-7, rtol=1e-5)


# Inputs at their limits


def test_keys_that_are_zero_give_zeros() -> None:
    for solver in SOLVERS:
        for backend in BACKENDS:
            inputs = {name: x.float() for name, x in draw(time=20).items()}
            inputs["k"] = torch.zeros_like(inputs["k"])
            leaves = {name: x.requires_grad_() for name, x in inputs.items()}
            o, (H, U) = gated_kalmanet(**leaves, solver=solver, backend=backend, output_final_state=True)
            assert not o.any() and not H.any() and not U.any()
            assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_key_ten_thousand_times(solver: str) -> None:
    """H = n k k^T and lambda = 0.02 n: what is read at k is the mean of the values over 1.02, elsewhere 0."""
    k = torch.zeros(1, 10_000, 1, 4)
    k[..., 1] = 1.0
    v = torch.randn(1, 10_000, 1, 2, generator=torch.Generator().manual_seed(0))
    o, _ = gated_kalmanet(k, k, v, torch.zeros(1, 10_000, 1), solver=solver, scale=1.0)
    means = v.double().cumsum(1) / torch.arange(1, 10_001)[:, None, None]
    assert (o - means / 1.02).abs().max() < (2e-3 if solver == "chebyshev" else 5e-5)
    o, _ = gated_kalmanet(k.roll(1, -1), k, v, torch.zeros(1, 10_000, 1), solver=solver, scale=1.0)
    assert o.abs().max() < 1e-4


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_dominant_direction(solver: str) -> None:
    """Keys a thousand times longer in one direction: float32 is as close to the exact solution as the iteration is."""
    inputs = draw(time=130)
    inputs["k"][..., 0] *= 1e3
    inputs["v"][..., 0] = 1.0
    wanted, _ = gated_kalmanet(**inputs, solver="exact", backend="reference")
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    o, _ = gated_kalmanet(**leaves, solver=solver)
    assert relative(o, wanted) < (1e-3 if solver == "chebyshev" else 1e-4)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


@pytest.mark.parametrize("solver", SOLVERS)
def test_decay_0_leaves_only_the_current_token(solver: str) -> None:
    inputs = draw(time=70)
    inputs.pop("mix")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    inputs["g"] = torch.full_like(inputs["g"], -math.inf)
    o, (H, U) = gated_kalmanet(**inputs, scale=1.0, output_final_state=True, **CONVERGED[solver])
    torch.testing.assert_close(o, (k * q).sum(-1, keepdim=True) / (1 + RIDGE) * v, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(H, k[:, -1, :, :, None] * k[:, -1, :, None, :])
    torch.testing.assert_close(U, k[:, -1, :, :, None] * v[:, -1, :, None, :])


@pytest.mark.parametrize("time", [2048, pytest.param(65_536, marks=pytest.mark.slow)])
def test_long_sequences_stay_finite(time: int) -> None:
    """And right: float32 against the exact solution in float64."""
    inputs = draw(batch=1, time=time, heads=1, key=4, value=3)
    inputs["g"] = inputs["g"] / 1000
    wanted, _ = gated_kalmanet(**inputs, solver="exact")
    for solver in SOLVERS:
        leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
        o, _ = gated_kalmanet(**leaves, solver=solver)
        assert relative(o, wanted) < (1e-3 if solver == "chebyshev" else 1e-4)
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))


def test_a_state_that_is_no_gram_matrix_is_not_answered_with_numbers() -> None:
    inputs = draw(batch=2, time=3, heads=1, key=4)
    H = torch.diag_embed(torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -9.0]], dtype=torch.float64))[:, None]
    for backend in BACKENDS:
        o, _ = gated_kalmanet(
            **inputs, solver="exact", initial_state=(H, torch.ones(2, 1, 4, 6, dtype=torch.float64)), backend=backend
        )
        assert o[0].isfinite().all() and o[1].isnan().all()


# What a call keeps, and what it refuses


@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_as_large_as_a_matrix_a_token_is_kept_for_the_backward(solver: str) -> None:
    inputs = draw(batch=1, time=512, heads=1, key=32, value=32, dtype=torch.float32)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        gated_kalmanet(**{name: x.requires_grad_() for name, x in inputs.items()}, solver=solver)
    assert max(kept.values()) <= 512 * 64
    assert sum(kept.values()) < 512 * 32 * 32 * 1.5


@pytest.mark.slow
def test_options_that_change_from_call_to_call_compile() -> None:
    inputs = draw(batch=1, time=5, heads=1)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda options: gated_kalmanet(**inputs, **options)[0], fullgraph=True, backend="aot_eager"
    )
    for options in ({"iterations": 3, "ridge": 0.1}, {"iterations": 4, "ridge": 0.2}, {"iterations": 5, "ridge": 0.3}):
        torch.testing.assert_close(compiled(options), gated_kalmanet(**inputs, **options)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"solver": "cholesky"},
            ValueError,
            "solver must be one of chebyshev, conjugate_gradient, exact, gradient_descent, .*, got 'cholesky'",
        ),
        ({"ridge": 0.0}, ValueError, "ridge must be a finite number, more than 0"),
        ({"ridge": torch.ones(2, 8)}, TypeError, "ridge must be a number"),
        ({"adaptive_ridge": 1}, TypeError, "adaptive_ridge must be True or False"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"iterations": 3.0}, TypeError, "iterations must be an integer"),
        ({"iterations": True}, TypeError, "iterations must be an integer"),
        ({"mix": torch.ones(2, 4, 2)}, ValueError, "mix must have shape"),
        ({"g": None}, TypeError, "g must be a torch.Tensor"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gated_kalmanet(**{**draw(time=5), **options})
