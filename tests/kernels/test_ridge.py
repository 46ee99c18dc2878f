"""The solvers' kernels against the reference: ridge systems of every token, their states, limits and ranges of numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.kernels.ridge.order import amplification, stride_between_roots
from fastweights.ops import gated_kalmanet, mesa
from fastweights.testing.contract.compare import (
    EXTREMES,
    assert_close,
    relative_error,
    replace_tokens,
    values_and_gradients,
)
from tests.fast_set import fast_where, slow

from . import ridge_accuracy
from .cases import DEVICE, KERNEL_CASES, draw_states, exact, small

pytestmark = pytest.mark.kernels
CHEBYSHEV, CONJUGATE, MESA = "gated_kalmanet-chebyshev", "gated_kalmanet-conjugate_gradient", "mesa"
CLOSE = 3e-5  # a ridge of .02 makes fifty times the rounding of float32 of a first key's gradient, in PyTorch too


def check(name: str, time: int, started: bool = False, edges: list[int] | None = None, **sizes: int) -> None:
    case = KERNEL_CASES[name]
    inputs = small(case, time, **sizes)
    keywords = {} if edges is None else {"cu_seqlens": torch.tensor(edges)}
    states = draw_states(case, inputs, 1 if edges is None else len(edges) - 1) if started else None
    got = values_and_gradients(case, inputs, states, backend="triton", **keywords)
    for found, wanted in zip(got, exact(case, inputs, states, **keywords)):
        assert_close(found, wanted, CLOSE)


@pytest.mark.parametrize("name", [CHEBYSHEV, pytest.param(MESA, marks=pytest.mark.slow)])
def test_over_the_edge_of_a_chunk(name: str) -> None:
    """From states of which H is not symmetric, with gradients of both."""
    check(name, 67, started=True)


def test_packed_sequences() -> None:
    """Short ones, an empty one, one over the edge of a chunk; with groups of heads."""
    check(MESA, 70, True, [0, 3, 3, 69, 70], value_heads=2)


@pytest.mark.parametrize(("key", "value"), [(5, 20), (33, 3)])
def test_any_width(key: int, value: int) -> None:
    check(CHEBYSHEV, 9, key=key, value=value)


def test_conjugate_gradients_of_gated_kalmanet() -> None:
    """The ridge follows |H_t|_F."""
    check(CONJUGATE, 66)


def test_conjugate_gradients_end_once_they_have_converged() -> None:
    """Values and gradients after any number of iterations that is enough are the same bits."""
    inputs = small(KERNEL_CASES[MESA], 40, key=32).map(Tensor.half)
    few, enough, more = (
        values_and_gradients(
            KERNEL_CASES[MESA], dataclasses.replace(inputs, options={"iterations": n}), backend="triton"
        )
        for n in (2, 14, 40)
    )
    for xs, ys, zs in zip(few, enough, more):
        assert all(torch.equal(y, z) for y, z in zip(ys, zs))
        assert not all(torch.equal(x, y) for x, y in zip(xs, ys))


def test_a_constant_ridge() -> None:
    check("gated_kalmanet-constant_ridge", 20, started=True)


@pytest.mark.slow
def test_mix_and_gain_of_key_heads() -> None:
    """A gate per key head serves its group of value heads, and gathers their gradients."""
    for name, gate in ((CHEBYSHEV, "mix"), (MESA, "beta")):
        inputs = small(KERNEL_CASES[name], 9, heads=1, value_heads=2)
        inputs = replace_tokens(inputs, **{gate: inputs.tokens[gate][:, :, :1]})
        got = values_and_gradients(KERNEL_CASES[name], inputs, backend="triton")
        for found, wanted in zip(got, exact(KERNEL_CASES[name], inputs)):
            assert_close(found, wanted, CLOSE)


@fast_where(lambda given: given["name"] == CHEBYSHEV and given["extreme"] in ("strong decay", "one key", "zero keys"))
@pytest.mark.parametrize("extreme", [x for x in EXTREMES if x != "decay 0"])
@pytest.mark.parametrize("name", [CHEBYSHEV, MESA])
def test_extremes_are_finite_and_agree(name: str, extreme: str) -> None:
    case = KERNEL_CASES[name]
    inputs = small(case, 18)
    changed = {key: EXTREMES[extreme](case.tokens[key], x) for key, x in inputs.tokens.items()}
    inputs = replace_tokens(inputs, **changed)
    got, gradients = values_and_gradients(case, inputs, backend="triton")
    assert all(x.isfinite().all() for x in (*got, *gradients))
    wanted, wanted_gradients = exact(case, inputs)
    for g, w in zip(got, wanted):
        assert relative_error(g, w) <= 1e-4
    largest = max(float(w.norm()) for w in wanted_gradients)
    for g, w in zip(gradients, wanted_gradients):
        assert (g - w).norm() <= 1e-3 * max(float(w.norm()), 1e-3 * largest)


@fast_where(
    lambda given: given["size"] == 2.0**-134 and given["name"] == (CONJUGATE if given["changed"] == "k" else CHEBYSHEV)
)
@pytest.mark.parametrize("size", [2.0**-134, 2.0**-122, 2.0**-148])
@pytest.mark.parametrize("name", [CHEBYSHEV, CONJUGATE])
@pytest.mark.parametrize("changed", ["do", "q", "k"])
def test_numbers_below_the_normal_range(name: str, size: float, changed: str) -> None:
    """Decays leave such gradients of early outputs in a long sequence. None is NaN, and a query's own is right as far as float32
    has bits for it."""
    case, few = KERNEL_CASES[name], 5
    inputs = small(case, 9, key=11, value=11)
    tokens = {"do": torch.randn(1, 9, 1, 11, generator=torch.Generator().manual_seed(0)).to(DEVICE), **inputs.tokens}
    tokens[changed] = torch.cat([size * tokens[changed][:, :few], tokens[changed][:, few:]], 1)
    do = tokens.pop("do")

    def outputs_and_gradients(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = {key: x.to(dtype).detach().requires_grad_() for key, x in tokens.items()}
        o, _ = case(replace_tokens(inputs, **leaves), backend=backend)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do.to(dtype))]

    got, wanted = outputs_and_gradients(torch.float32, "triton"), outputs_and_gradients(torch.float64, "reference")
    assert_close(got, wanted, CLOSE)
    if changed == "do":
        rounding = 2.0**-141 / size  # of numbers of this size, with 8 bits for what a system makes of it
        dq, wanted_dq = (xs[1 + list(tokens).index("q")][:, :few] for xs in (got, wanted))
        assert relative_error(dq, wanted_dq) <= CLOSE + rounding


@pytest.mark.parametrize("size", [pytest.param(1.0, marks=pytest.mark.slow), 30.0])
@pytest.mark.parametrize("name", [CHEBYSHEV, *slow(CONJUGATE)])
def test_float16_whatever_the_size_of_keys(name: str, size: float) -> None:
    """Operands are float16 in units of the system. Sizes differ by token as well."""
    case = KERNEL_CASES[name]
    inputs = small(case, 70, key=16)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    sizes = size * torch.logspace(-1, 0, 70)[order].to(DEVICE)
    half = replace_tokens(inputs, k=inputs.tokens["k"] * sizes[None, :, None, None]).map(Tensor.half)
    got, wanted = values_and_gradients(case, half, backend="triton"), exact(case, half)
    assert max(map(relative_error, got[0], wanted[0])) < 4e-3
    assert max(map(relative_error, got[1], wanted[1])) < 2e-2


@pytest.mark.parametrize(
    "half_life", [pytest.param(x, marks=pytest.mark.slow if x > 1 else ()) for x in ridge_accuracy.HALF_LIVES]
)
def test_accuracy_against_a_dense_solution(half_life: float) -> None:
    """In float16, as the interpreter has no bfloat16 products; tests/gpu has both. With fast decays the gradients of the decays
    are small differences of large sums: rounded apart, these left an error of 3e-2 here and 3e-1 in bfloat16."""
    ridge_accuracy.check(ridge_accuracy.errors(half_life, torch.float16, DEVICE, time=70, heads=1, width=32))


@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_bad_numbers(bad: float) -> None:
    """They reach what follows in their head, and nothing else; a query or a mix its own token alone."""
    case = KERNEL_CASES[CHEBYSHEV]
    inputs = small(case, 5, heads=2)
    clean, _ = case(inputs, backend="triton")
    for name, x in inputs.tokens.items():
        if name == "g":
            continue
        broken = x.clone()
        broken[(0, 2, 1) + (2,) * (x.ndim - 3)] = bad
        o, states = case(replace_tokens(inputs, **{name: broken}), backend="triton")
        assert torch.equal(o[:, :, 0], clean[:, :, 0]) and torch.equal(o[:, :2], clean[:, :2]), name
        here = o[0, 2:, 1] if name in ("k", "g") else o[0, 2:, 1, 2] if name == "v" else o[0, 2, 1]
        assert here.isnan().all(), name
        assert all(s[0, 0].isfinite().all() and not s.isinf().any() for s in states), name
        if name in ("q", "mix"):
            assert torch.equal(o[:, 3:], clean[:, 3:])


def test_other_solvers_and_wide_heads_are_refused() -> None:
    arguments: dict[str, Any] = (
        KERNEL_CASES[CHEBYSHEV].draw(time=2, dtype=torch.float32).map(lambda x: x.to(DEVICE)).tokens
    )
    with pytest.raises(ValueError, match="solver must be 'chebyshev' or 'conjugate_gradient' with backend 'triton'"):
        gated_kalmanet(**arguments, solver="exact", backend="triton")
    for dtype, most, width in ((torch.bfloat16, 128, 144), (torch.float32, 64, 80)):
        wide = KERNEL_CASES[MESA].draw(time=2, key=width, dtype=dtype).map(lambda x: x.to(DEVICE))
        with pytest.raises(ValueError, match=f"at most {most} channels with backend 'triton'.*got {width}"):
            mesa(**wide.arguments(), backend="triton")


@pytest.mark.parametrize("low", [0.002, 0.02, 0.25])
@pytest.mark.parametrize("count", [2, 9, 16, 31, 51])
def test_the_order_of_the_roots_keeps_the_iterate_small(count: int, low: float) -> None:
    """One root after the other in rising order, most iterates would grow until the last ones."""
    assert amplification(stride_between_roots(count, low), count, low)[1] <= 64
    if count == 51:
        assert amplification(1, count, low)[1] > 1e4
