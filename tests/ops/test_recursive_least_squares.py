"""Recursive least squares: the regression it solves, the theorems about it, and what keeps it finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, linear_attention, precondition_queries, recursive_least_squares
from fastweights.testing import CASES, OpInputs

CASE = CASES["recursive_least_squares-head"]
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def fast_decay(inputs: OpInputs, factor: float = 10.0) -> OpInputs:
    return OpInputs({**inputs.tokens, "g": factor * inputs.tokens["g"]}, inputs.parameters, inputs.options)


def weighted_ridge(k: Tensor, v: Tensor, beta: Tensor, g: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """S and P of all tokens, [B, T, H, ..] each, from the normal equations. Weights are products of later decays."""
    later = g.flip(1).cumsum(1).flip(1)
    weight = (later - g).exp() * beta
    gram = torch.einsum("bth,bthk,bthl->bhkl", weight, k, k)
    gram = gram + ridge * later[:, 0].exp()[..., None, None] * torch.eye(k.shape[-1], dtype=k.dtype)
    P = torch.linalg.inv(gram)
    return P @ torch.einsum("bth,bthk,bthv->bhkv", weight, k, v), P


@BACKENDS
def test_state_is_the_weighted_ridge_regression_at_every_token(backend: str) -> None:
    inputs = fast_decay(CASE.draw(time=24, key=5))
    tokens = inputs.tokens
    for t in range(1, 25):
        part = inputs.at((slice(None), slice(0, t)))
        _, (S, P) = recursive_least_squares(**part.tokens, ridge=0.3, output_final_state=True, backend=backend)
        wanted = weighted_ridge(*(tokens[name][:, :t] for name in ("k", "v", "beta", "g")), 0.3)
        assert relative(S, wanted[0]) < 1e-10
        assert relative(P, wanted[1]) < 1e-10


def test_is_linear_attention_read_with_the_exact_preconditioner() -> None:
    """Preconditioned DeltaNet, Theorem 3.1."""
    inputs = CASES["recursive_least_squares-none"].draw(time=70, key=7).tokens
    o, _ = recursive_least_squares(**inputs, ridge=0.5, scale=1.0)
    gram = (inputs["beta"][..., None, None] * inputs["k"][..., :, None] * inputs["k"][..., None, :]).cumsum(1)
    preconditioned = torch.linalg.solve(gram + 0.5 * torch.eye(7, dtype=gram.dtype), inputs["q"])
    wanted, _ = linear_attention(preconditioned, inputs["k"], inputs["beta"][..., None] * inputs["v"], scale=1.0)
    assert relative(o, wanted) < 1e-12


def test_a_diagonal_preconditioner_is_neither() -> None:
    """Preconditioned DeltaNet, Theorem C.2 and its example: 1/2 on the query side, 1/3 on the key side. The exact rule has 1/3 on
    both."""
    one = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    gate, none = one[..., 0], torch.zeros(1, 1, 1, dtype=torch.float64)
    identity = torch.eye(2, dtype=torch.float64)[None, :, None]
    twice = one.expand(1, 2, 1, 2)  # the second token reads with the other unit vector and writes nothing
    writes = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1)
    tilde, _ = precondition_queries(identity, twice, none.expand(1, 2, 1), writes, ridge=1.0)
    query_side, _ = linear_attention(tilde, writes[..., None] * twice, twice, scale=1.0)
    _, key_side = delta_rule(one, one, one, gate, write_key=one / (1 + 2), output_final_state=True)
    _, (exact, _) = recursive_least_squares(one, one, one, gate, ridge=1.0, output_final_state=True)
    torch.testing.assert_close(query_side, torch.full_like(query_side, 1 / 2))
    torch.testing.assert_close(key_side, torch.full_like(exact, 1 / 3))
    torch.testing.assert_close(exact, torch.full_like(exact, 1 / 3))


@BACKENDS
def test_independent_keys_are_recalled_exactly(backend: str) -> None:
    """Variational Linear Attention, Proposition 3: true of exact least squares as the ridge goes to zero."""
    inputs = CASES["recursive_least_squares-none"].draw(time=8, key=8).tokens
    _, (S, _) = recursive_least_squares(**inputs, ridge=1e-9, output_final_state=True, backend=backend)
    assert relative(torch.einsum("bthk,bhkv->bthv", inputs["k"], S), inputs["v"]) < 1e-5


@BACKENDS
def test_decay_of_zero_forgets_how_sure_the_memory_is(backend: str) -> None:
    """P starts again from 100 / ridge and the next key is written with gain beta / (beta + ridge / 100)."""
    tokens = dict(CASE.draw(time=12, batch=1, heads=1).tokens)
    tokens["g"] = torch.where(torch.arange(12) == 11, -math.inf, tokens["g"][0, :, 0]).view(1, 12, 1)
    before = {name: x[:, :11] for name, x in tokens.items()}
    _, (S, _) = recursive_least_squares(**before, output_final_state=True, backend=backend)
    _, (new, P) = recursive_least_squares(**tokens, output_final_state=True, backend=backend)
    k, v, beta = tokens["k"][0, 11, 0], tokens["v"][0, 11, 0], tokens["beta"][0, 11, 0]
    answer, old = new[0, 0].T @ k, S[0, 0].T @ k
    torch.testing.assert_close(answer, old + beta / (beta + 0.01) * (v - old))
    torch.testing.assert_close(torch.linalg.eigvalsh(P[0, 0])[1:], torch.full((7,), 100.0, dtype=torch.float64))
    across = torch.linalg.svd(k[None]).Vh[1:]  # what no key asks for is left as it was
    torch.testing.assert_close(across @ new[0, 0], across @ S[0, 0])


def test_decay_of_one_is_no_decay() -> None:
    tokens = dict(CASE.draw(time=70).tokens)
    zero, _ = recursive_least_squares(**{**tokens, "g": torch.zeros_like(tokens["g"])})
    tokens.pop("g")
    torch.testing.assert_close(zero, recursive_least_squares(**tokens)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("factor", [10, 40, 1000], ids=lambda f: f"decay x{f}")
def test_strong_forgetting_is_still_the_sequential_rule(factor: float) -> None:
    """Down to decays that leave 1e-200 of a chunk's start: the halves of a chunk are then solved apart."""
    inputs = fast_decay(CASE.draw(time=70, key=4), factor)
    results = []
    for backend in ("reference", "torch"):
        leaves = inputs.map(lambda x: x.clone().requires_grad_())
        o, (S, P) = CASE(leaves, backend=backend)
        gradients = torch.autograd.grad(o.sum() + S.sum() + P.mean(), list(leaves.tokens.values()))
        results.append([o.detach(), S.detach(), P.detach(), *gradients])
    for got, wanted in zip(results[1], results[0]):
        assert wanted.isfinite().all()
        assert relative(got, wanted) < 1e-6


WOUND_UP = [(seed, time) for seed in range(4) for time in (65, 67, 69, 72, 75, 76)]  # P up to 5e9


@pytest.mark.parametrize(("seed", "time"), WOUND_UP)
def test_a_memory_that_winds_up_is_the_sequential_rule_in_float32(seed: int, time: int) -> None:
    inputs = fast_decay(CASE.draw(time=time, seed=seed, dtype=torch.float32), 100)
    wanted, (wanted_S, _) = CASE(inputs.map(Tensor.double), backend="reference")
    o, (S, _) = CASE(inputs, backend="torch")
    assert relative(o, wanted) < 1e-5 and relative(S, wanted_S) < 5e-5  # up to 2.3e-5, by how a processor rounds


@BACKENDS
@pytest.mark.parametrize(("seed", "time"), WOUND_UP[::5])
def test_P_in_float32_counts_no_weight_that_float32_cannot_tell_from_none(seed: int, time: int, backend: str) -> None:
    """With s = 1e-11 ridge + eps / 16 of the trace of G = P^-1, a weight w of G gives (w + 2 s) / (w + s)^2 in P and not 1 / w,
    at most 2 / s. Beside larger entries float32 could not keep the smallest, and a P read back would not be definite."""
    inputs = fast_decay(CASE.draw(time=time, seed=seed, dtype=torch.float32), 100)
    _, (_, exact) = CASE(inputs.map(Tensor.double), backend="reference")
    _, (_, P) = CASE(inputs, backend=backend)
    weights, directions = torch.linalg.eigh(torch.linalg.inv(exact))
    s = (1e-11 + torch.finfo(torch.float32).eps / 16 * weights.sum(-1))[..., None]
    kept = (weights + 2 * s) / (weights + s).square()
    assert relative(P, (directions * kept[..., None, :]) @ directions.mT) < 2e-2
    assert (P.diagonal(dim1=-2, dim2=-1) < 2 / s).all()


def test_wind_up_is_bounded() -> None:
    """One key for 2,000 tokens with decays near 0.8: P would reach 1e190 in the other directions."""
    inputs = fast_decay(CASE.draw(batch=1, time=2000, heads=1, dtype=torch.float32))
    tokens = {**inputs.tokens, "k": inputs.tokens["k"][:, :1].expand_as(inputs.tokens["k"])}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tokens.items()}
    o, (S, P) = recursive_least_squares(**leaves, ridge=0.5, output_final_state=True)
    gradients = torch.autograd.grad(o.sum() + S.sum() + P.sum(), list(leaves.values()))
    assert all(x.isfinite().all() for x in (o, S, P, *gradients))
    assert P.abs().max() < 2e11 / 0.5
    weight = (tokens["g"].flip(1).cumsum(1).flip(1) - tokens["g"]).exp() * tokens["beta"]
    mean = (weight[..., None] * tokens["v"]).sum(1) / weight.sum(1)[..., None]
    assert relative(torch.einsum("bhk,bhkv->bhv", tokens["k"][:, 0], S), mean) < 1e-4


def test_one_key_ten_thousand_times_is_the_mean_of_its_values() -> None:
    k = F.normalize(torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0)), dim=-1).expand(
        1, 10_000, 1, 16
    )
    v = 1 + torch.randn(1, 10_000, 1, 4, generator=torch.Generator().manual_seed(1))
    _, (S, P) = recursive_least_squares(k, k, v, torch.ones(1, 10_000, 1), output_final_state=True)
    assert relative(S[0, 0].T @ k[0, 0, 0], v.sum(1)[0, 0] / 10_001) < 1e-5
    assert relative(P[0, 0] @ k[0, 0, 0], k[0, 0, 0] / 10_001) < 1e-2  # float32: 1e-4 beside the 1 of other directions


def test_zero_keys_write_nothing() -> None:
    tokens = dict(CASES["recursive_least_squares-none"].draw(time=70).tokens)
    tokens["k"] = torch.zeros_like(tokens["k"])
    o, (S, P) = recursive_least_squares(**tokens, ridge=0.5, output_final_state=True)
    assert not o.any() and not S.any()
    torch.testing.assert_close(P, 2.0 * torch.eye(8, dtype=P.dtype).expand_as(P))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [False, True], ids=["no decay", "decay"])
def test_65536_tokens_in_float32(decay: bool) -> None:
    """Keys with one dominant direction; the end against the normal equations of the last tokens in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 65_536, 1, 8)
    k = F.normalize(torch.randn(shape, generator=generator) * 0.02 + torch.eye(8)[0], dim=-1)
    v = torch.randn(shape, generator=generator)
    beta = torch.rand(shape[:3], generator=generator)
    g = -0.01 * torch.rand(shape[:3], generator=generator) * decay
    o, (S, P) = recursive_least_squares(k, k, v, beta, g if decay else None, output_final_state=True)
    assert o.isfinite().all()
    wanted, inverse = weighted_ridge(*(x.double() for x in (k, v, beta, g)), 1.0)
    assert relative(S, wanted) < 1e-5
    assert relative(P, inverse) < 1e-5
    assert torch.linalg.eigvalsh(P[0, 0]).min() > 0


def test_read_token_by_token_in_float32_after_a_reset() -> None:
    tokens = dict(CASE.draw(batch=1, time=60, dtype=torch.float32).tokens)
    tokens["g"] = torch.where(torch.arange(60).view(60, 1) % 25 == 20, -math.inf, tokens["g"])
    whole, _ = recursive_least_squares(**tokens)
    state, outputs = None, []
    for t in range(60):
        part = {name: x[:, t : t + 1] for name, x in tokens.items()}
        o, state = recursive_least_squares(**part, initial_state=state, output_final_state=True)
        outputs.append(o)
    assert relative(torch.cat(outputs, 1), whole) < 1e-5


def test_memory_is_kept_by_the_chunk() -> None:
    """The graph holds less than one K x K matrix of float32 a token would be."""
    sizes = {"batch": 1, "time": 512, "heads": 1, "key": 64, "value": 64}
    inputs = CASE.draw(**sizes, dtype=torch.float32).map(lambda x: x.requires_grad_())
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = recursive_least_squares(**inputs.tokens)
    assert o.requires_grad
    assert 512 * 64 * 4 < sum(kept.values()) < 512 * 64 * 64 * 4


def test_refused_arguments() -> None:
    tokens = CASE.draw(time=5).tokens
    with pytest.raises(ValueError, match="beta must be at least 0, got -0.5 at its smallest"):
        recursive_least_squares(**{**tokens, "beta": torch.full_like(tokens["beta"], -0.5)})
    with pytest.raises(ValueError, match="ridge must be a finite number, more than 0, got 0"):
        recursive_least_squares(**tokens, ridge=0.0)
    with pytest.raises(ValueError, match="g must have shape"):
        recursive_least_squares(**{**tokens, "g": torch.zeros_like(tokens["k"])})
