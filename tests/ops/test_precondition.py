"""Diagonal preconditioners: the running energy of the key channels, and what write keys and queries become by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.ops import delta_rule, linear_attention, mesa, precondition_keys, precondition_queries
from fastweights.testing import CASES
from fastweights.testing.contract.compare import relative_error
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE

from .key_energies import FORMS, by_kernel, token_by_token

backends = pytest.mark.parametrize("backend", ["reference", "torch"])
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def draw(name: str = "precondition_keys", **sizes: int) -> dict[str, Tensor]:
    """All inputs but the ridge of queries, which a test chooses."""
    inputs = CASES[name].draw(**sizes)
    return {x: y for x, y in {**inputs.tokens, **inputs.parameters}.items() if x != "ridge"}


def numbers(*rows: object) -> Tensor:
    """One sequence and one head: [1, T, 1, ...]."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


TWO = {
    "k": numbers([2.0, 1.0], [0.0, -2.0]),
    "g": numbers(math.log(0.5), math.log(0.25)),
    "beta": numbers(0.5, 2.0),
}
START = torch.tensor([[[4.0, 1.0]]], dtype=torch.float64)
ENERGY = numbers([4.0, 1.0], [1.0, 8.25])  # 0.5 (4, 1) + 0.5 (4, 1), then 0.25 (4, 1) + 2 (0, 4)


# Keys


@backends
def test_keys_of_two_tokens_by_hand(backend: str) -> None:
    w, A = precondition_keys(
        **TWO, center=0.5, bound=2.0, eps=0.75, initial_state=START, output_final_state=True, backend=backend
    )
    torch.testing.assert_close(A, ENERGY[:, -1])
    wanted = []
    for key, energy in zip(TWO["k"].flatten().tolist(), ENERGY.flatten().tolist()):
        r = math.log(energy + 0.75) - 0.5
        wanted.append(2.0 ** (-r / (1 + abs(r))) * key)
    torch.testing.assert_close(w.flatten().tolist(), wanted)


@backends
def test_keys_squashed_by_tanh_by_hand(backend: str) -> None:
    w, A = precondition_keys(
        **TWO,
        center=0.5,
        bound=2.0,
        eps=0.75,
        squash="tanh",
        initial_state=START,
        output_final_state=True,
        backend=backend,
    )
    torch.testing.assert_close(A, ENERGY[:, -1])
    wanted = [
        2.0 ** -math.tanh(math.log(energy + 0.75) - 0.5) * key
        for key, energy in zip(TWO["k"].flatten().tolist(), ENERGY.flatten().tolist())
    ]
    torch.testing.assert_close(w.flatten().tolist(), wanted)


@backends
@pytest.mark.parametrize("edges", [None, [0, 1, 2]], ids=["one", "packed"])
def test_unstable_keys_of_two_tokens_by_hand(backend: str, edges: list[int] | None) -> None:
    """A of the token before, that of the initial state for the first token of a sequence, and no squash."""
    start = START if edges is None else torch.cat([START, 3 * START])
    before = numbers([4.0, 1.0], [4.0, 1.0] if edges is None else [12.0, 3.0])
    if edges is None:
        before[0, 1] = ENERGY[0, 0]
    w, _ = precondition_keys(
        **TWO, center=9.0, squash="none", ridge=0.5, initial_state=start, backend=backend,
        cu_seqlens=None if edges is None else torch.tensor(edges),
    )  # fmt: skip
    for t in range(2):
        k, A = TWO["k"][0, t, 0].tolist(), before[0, t, 0].tolist()
        p = [k[i] / (A[i] + 0.5) for i in range(2)]
        wanted = [p[i] / (1 + k[0] * p[0] + k[1] * p[1]) for i in range(2)]
        torch.testing.assert_close(w[0, t, 0].tolist(), wanted)


@backends
def test_unstable_write_of_theorem_c2(backend: str) -> None:
    """Two channels, ridge 1, k = v = (1, 1): the delta rule writes 1/3 everywhere, where the query side has 1/2."""
    k, ones = numbers([1.0, 1.0]), numbers(1.0)
    w, _ = precondition_keys(k, 0 * ones, ones, 0.0, squash="none", ridge=1.0, backend=backend)
    _, S = delta_rule(k, k, k, ones, write_key=w, output_final_state=True, backend=backend)
    torch.testing.assert_close(S, torch.full_like(S, 1 / 3))
    q, _ = precondition_queries(k, k, 0 * ones, ones, ridge=1.0, backend=backend)
    o, _ = linear_attention(q, k, k, scale=1.0, backend=backend)
    torch.testing.assert_close(o, torch.full_like(o, 2 * 1 / 2))  # S q with S = 1/2 everywhere


def test_the_step_of_unstable_keys_stays_a_contraction() -> None:
    """k . w in [0, 1) for keys of any length and any A (the paper's appendix C.3)."""
    x = draw(time=200)
    w, _ = precondition_keys(**{**x, "k": 30 * x["k"]}, squash="none", ridge=1e-3)
    overlap = (30 * x["k"] * w).sum(-1)
    assert overlap.min() >= 0 and 0.9 < overlap.max() < 1


def test_unknown_squash_and_a_ridge_of_zero_are_refused() -> None:
    x = draw(time=3)
    with pytest.raises(ValueError, match="squash must be one of softsign, tanh, none, got 'relu'"):
        precondition_keys(**x, squash="relu")
    with pytest.raises(ValueError, match="ridge must be"):
        precondition_keys(**x, squash="none", ridge=0.0)


@backends
def test_without_decay_the_energy_is_a_cumulative_sum(backend: str) -> None:
    x = draw(time=130)
    x["g"] = torch.zeros_like(x["g"])
    _, A = precondition_keys(**x, output_final_state=True, backend=backend)
    torch.testing.assert_close(A, (x["beta"][..., None] * x["k"].square()).sum(1), **EXACT)


@backends
def test_decay_0_and_gain_0(backend: str) -> None:
    x, start = draw(time=70), torch.rand(2, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"initial_state": start, "output_final_state": True, "backend": backend}
    forgetful = {**x, "g": torch.full_like(x["g"], -math.inf)}
    _, A = precondition_keys(**forgetful, **options)
    torch.testing.assert_close(A, x["beta"][:, -1, :, None] * x["k"][:, -1].square(), **EXACT)
    deaf = {**x, "beta": torch.zeros_like(x["beta"])}
    _, A = precondition_keys(**deaf, **options)
    torch.testing.assert_close(A, x["g"].sum(1).exp()[..., None] * start, **EXACT)


@backends
def test_bound_1_leaves_the_keys(backend: str) -> None:
    x = draw(time=70)
    torch.testing.assert_close(precondition_keys(**x, bound=1.0, backend=backend)[0], x["k"], rtol=0, atol=0)


@backends
def test_the_energy_at_the_center_leaves_the_key(backend: str) -> None:
    x = {**draw(time=1), "center": torch.tensor([0.0, math.log(3.0)])}
    x["g"], x["beta"] = torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    for energy, kept in ((1.0, 0), (3.0, 1)):
        start = torch.full((2, 2, 8), energy, dtype=torch.float64)
        w, _ = precondition_keys(**x, eps=1e-12, initial_state=start, backend=backend)
        torch.testing.assert_close(w[:, :, kept], x["k"][:, :, kept])
        assert (w[:, :, 1 - kept] - x["k"][:, :, 1 - kept]).abs().min() > 1e-3


@backends
def test_quiet_channels_are_written_more_strongly_within_the_bound(backend: str) -> None:
    energies = torch.logspace(-8, 8, 8, dtype=torch.float64)
    x = {"k": -torch.ones(1, 1, 1, 8, dtype=torch.float64), "g": torch.zeros(1, 1, 1), "beta": torch.zeros(1, 1, 1)}
    w, _ = precondition_keys(**x, center=0.0, bound=1.7, initial_state=energies[None, None], backend=backend)
    factor = -w.flatten()  # the sign of the key stays
    assert (factor.diff() < 0).all()
    assert 1 / 1.7 < factor[-1] < 1 / 1.6 and 1.6 < factor[0] < 1.7
    torch.testing.assert_close(factor * factor.flip(0), torch.ones(8, dtype=torch.float64), rtol=1e-2, atol=0)


@backends
def test_a_center_may_be_a_number_or_one_per_head(backend: str) -> None:
    x = draw(time=20)
    x.pop("center")
    number, _ = precondition_keys(**x, center=-0.3, backend=backend)
    for center in (torch.tensor(-0.3), torch.full((2,), -0.3)):
        torch.testing.assert_close(precondition_keys(**x, center=center, backend=backend)[0], number, rtol=1e-6, atol=0)
    heads = torch.tensor([-0.3, 0.4], dtype=torch.float64)
    both, _ = precondition_keys(**x, center=heads, backend=backend)
    torch.testing.assert_close(both[:, :, 0], number[:, :, 0], **EXACT)
    torch.testing.assert_close(both[:, :, 1], precondition_keys(**x, center=0.4, backend=backend)[0][:, :, 1], **EXACT)


@backends
def test_channels_do_not_meet(backend: str) -> None:
    x = draw(time=20)
    w, _ = precondition_keys(**x, backend=backend)
    louder = {**x, "k": x["k"] * torch.tensor([5.0, 1, 1, 1, 1, 1, 1, 1])}
    torch.testing.assert_close(precondition_keys(**louder, backend=backend)[0][..., 1:], w[..., 1:], **EXACT)


@backends
def test_one_write_key_per_value_head(backend: str) -> None:
    x = draw(time=20, heads=2, value_heads=6)
    w, A = precondition_keys(**x, output_final_state=True, backend=backend)
    assert w.shape == (2, 20, 6, 8) and A.shape == (2, 6, 8)
    for head, key_head in enumerate([0, 0, 0, 1, 1, 1]):
        own = {"k": x["k"][:, :, [key_head]], **{name: x[name][:, :, [head]] for name in ("g", "beta")}}
        alone = precondition_keys(**own, center=x["center"][[head]], output_final_state=True, backend=backend)
        torch.testing.assert_close((w[:, :, [head]], A[:, [head]]), alone, **EXACT)


@backends
def test_silence_has_finite_gradients(backend: str) -> None:
    x = {name: y.requires_grad_() for name, y in draw(time=20).items()}
    w, A = precondition_keys(**{**x, "k": 0 * x["k"]}, output_final_state=True, backend=backend)
    assert not w.any() and not A.any()
    assert all(y.isfinite().all() for y in torch.autograd.grad(w.sum() + A.sum(), list(x.values())))


# Queries


@backends
def test_queries_of_two_tokens_by_hand(backend: str) -> None:
    q = numbers([6.0, -3.0], [4.0, 0.0])
    options = {"initial_state": START, "output_final_state": True, "backend": backend}
    o, A = precondition_queries(q, **TWO, ridge=2.0, **options)
    torch.testing.assert_close(A, ENERGY[:, -1])
    torch.testing.assert_close(o, numbers([1.0, -1.0], [4 / 3, 0.0]))
    o, _ = precondition_queries(q, **TWO, ridge=torch.tensor([[2.0, 5.0]]), **options)
    torch.testing.assert_close(o, numbers([1.0, -0.5], [4 / 3, 0.0]))


@backends
def test_a_ridge_may_be_one_per_head(backend: str) -> None:
    x = draw("precondition_queries", time=20)
    heads, _ = precondition_queries(**x, ridge=torch.tensor([0.5, 2.0]), backend=backend)
    for head, ridge in enumerate((0.5, 2.0)):
        alone, _ = precondition_queries(**x, ridge=ridge, backend=backend)
        torch.testing.assert_close(heads[:, :, head], alone[:, :, head], **EXACT)


@backends
def test_one_query_per_value_head(backend: str) -> None:
    x = draw("precondition_queries", time=20, heads=2, value_heads=6)
    o, A = precondition_queries(**x, ridge=0.3, output_final_state=True, backend=backend)
    assert o.shape == (2, 20, 6, 8) and A.shape == (2, 6, 8)
    for head, key_head in enumerate([0, 0, 0, 1, 1, 1]):
        own = {name: x[name][:, :, [key_head if name in "qk" else head]] for name in x}
        alone = precondition_queries(**own, ridge=0.3, output_final_state=True, backend=backend)
        torch.testing.assert_close((o[:, :, [head]], A[:, [head]]), alone, **EXACT)


@backends
def test_with_keys_of_one_channel_each_it_solves_the_regression(backend: str) -> None:
    """The key Gram matrix is then diagonal: linear attention behind these queries is the exact ridge regression of mesa."""
    x = draw("precondition_queries", time=40)
    v = CASES["mesa"].draw(time=40).tokens["v"]
    channel = torch.arange(40) * 3 % 8
    x["k"] = 1.5 * torch.eye(8, dtype=torch.float64)[channel][None, :, None].expand(2, 40, 2, 8)
    q, _ = precondition_queries(**x, ridge=0.4, backend=backend)
    o, _ = linear_attention(q, x["k"], x["beta"][..., None] * v, x["g"], scale=1.0, backend=backend)
    wanted, _ = mesa(**x, v=v, ridge=0.4, scale=1.0, iterations=30)
    torch.testing.assert_close(o, wanted, rtol=1e-8, atol=1e-9)


# The kernels by chunks, on a GPU or in Triton's interpreter. tests/kernels has what all ops share.


@pytest.mark.kernels
@pytest.mark.parametrize("form", [x if x == "queries" else pytest.param(x, marks=pytest.mark.slow) for x in FORMS])
def test_gates_of_key_heads_and_of_value_heads(form: str) -> None:
    """One decay per key head and one gain per value head, in packed rows of unequal lengths."""
    name, options = FORMS[form]
    drawn = {x: y.to(DEVICE) for x, y in draw(name, batch=1, time=70, heads=2, value_heads=4).items()}
    drawn["g"] = drawn["g"][:, :, ::2]
    edges = torch.tensor([0, 66, 66, 70], device=DEVICE)
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "torch")):
        x = {n: y.to(dtype, copy=True).requires_grad_() for n, y in drawn.items()}
        o, A = getattr(ops, name)(**x, **options, cu_seqlens=edges, output_final_state=True, backend=backend)
        leaves = [x[n] for n in ("q", "k", "g", "beta") if n in x]
        results.append([o, A, *torch.autograd.grad(o.sin().sum() + A.sin().sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        assert relative_error(got, wanted) <= 1e-5


@pytest.mark.slow
@pytest.mark.kernels
def test_a_ridge_may_be_a_number_one_per_head_or_one_per_channel() -> None:
    x = {n: y.float().to(DEVICE) for n, y in draw("precondition_queries", time=20).items()}
    number, _ = precondition_queries(**x, ridge=0.4, backend="triton")
    for shape in ((2,), (2, 8)):
        ridge = torch.full(shape, 0.4, device=DEVICE, requires_grad=True)
        o, _ = precondition_queries(**x, ridge=ridge, backend="triton")
        assert torch.equal(o, number)
        (got,) = torch.autograd.grad(o.sum(), ridge)
        exact, wanted = ridge.detach().double().requires_grad_(), {n: y.double() for n, y in x.items()}
        torch.autograd.backward(precondition_queries(**wanted, ridge=exact, backend="torch")[0].sum())
        assert got.shape == shape and relative_error(got, exact.grad) <= 1e-5


@fast_where(lambda given: given["form"] in ("queries", "softsign"))
@pytest.mark.kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["q", "k", "A"])
def test_kernels_take_infinities_for_bad_numbers(form: str, where: str) -> None:
    """A query divided by an infinite energy would be 0, a number like any other."""
    name, options = FORMS[form]
    x = {n: y.float().to(DEVICE) for n, y in draw(name, batch=1, time=20).items()}
    if where not in (*x, "A"):
        pytest.skip("no such input")
    A = torch.ones(1, 2, 8, device=DEVICE)
    (A if where == "A" else x[where][:, 3])[0, 1, 2] = math.inf
    given = {**x, **options, "initial_state": A}
    got, _ = getattr(ops, name)(**given, backend="triton")
    wanted, _ = getattr(ops, name)(**given, backend="torch")
    assert wanted.isnan().any() and torch.equal(got.isnan(), wanted.isnan())


# The kernel of a few tokens, on a GPU or in Triton's interpreter


forms = pytest.mark.parametrize("form", FORMS)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def few_tokens(form: str, **sizes: int) -> dict[str, Tensor]:
    """Inputs in float32, of two value heads per key head."""
    name, _ = FORMS[form]
    return {x: y.float().to(DEVICE) for x, y in draw(name, heads=1, value_heads=2, key=20, **sizes).items()}


def first_energies(count: int) -> Tensor:
    return torch.rand(count, 2, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.kernels
@forms
@pytest.mark.parametrize("edges", [None, [0, 2, 2, 3]], ids=["rows", "packed"])
def test_kernel_of_few_tokens(form: str, edges: list[int] | None) -> None:
    x = few_tokens(form, batch=2 if edges is None else 1, time=3)
    cu_seqlens = None if edges is None else torch.tensor(edges, device=DEVICE)
    A = first_energies(2 if edges is None else 3)
    wanted, final = token_by_token(form, x, A, cu_seqlens)
    again = A.clone()
    o = by_kernel(form, x, A, cu_seqlens)
    torch.testing.assert_close((o.cpu().double(), A.cpu().double()), (wanted, final), **CLOSE)
    assert torch.equal(by_kernel(form, x, again, cu_seqlens), o) and torch.equal(again, A)


@pytest.mark.kernels
@forms
def test_kernel_on_rows_of_a_pool(form: str) -> None:
    """Outputs and states of its own call to the last bit; a sequence without a row answers zeros, other rows stay."""
    x, rows = few_tokens(form, batch=3, time=1), torch.tensor([4, -1, 1], device=DEVICE, dtype=torch.int32)
    A = first_energies(3)
    pool = torch.full((6, 2, 24), 7.0, device=DEVICE)[:, :, :20]
    pool[[4, 1]] = A[[0, 2]]
    wanted = by_kernel(form, x, A, None)
    wanted[1] = 0
    o = by_kernel(form, x, pool, None, rows)
    assert torch.equal(o, wanted) and torch.equal(pool[[4, 1]], A[[0, 2]]) and bool((pool[[0, 2, 3, 5]] == 7).all())


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("form", "where"),
    [("queries", "q"), ("queries", "k"), ("queries", "g"), ("softsign", "A"), ("none", "k"), ("none", "beta")],
)
def test_kernel_keeps_bad_numbers_where_they_belong(form: str, where: str) -> None:
    x, A = few_tokens(form, batch=1, time=3), first_energies(1)
    (A if where == "A" else x[where][:, 1:])[0, 0, 1 if where == "A" else 0] = math.nan
    wanted, final = token_by_token(form, x, A, None)
    o = by_kernel(form, x, A, None)
    assert torch.equal(o.isnan().cpu(), wanted.isnan()) and torch.equal(A.isnan().cpu(), final.isnan())


@pytest.mark.kernels
def test_kernel_with_a_ridge_per_head_or_channel() -> None:
    x = few_tokens("queries", batch=2, time=1)
    heads, channels = torch.tensor([0.2, 3.0], device=DEVICE), torch.rand(2, 20, device=DEVICE) + 0.1
    for ridge in (heads, channels, 0.3):
        A, given = first_energies(2), {**x, "ridge": ridge}
        wanted, _ = token_by_token("queries", given, A, None)
        torch.testing.assert_close(by_kernel("queries", given, A, None).cpu().double(), wanted, **CLOSE)
