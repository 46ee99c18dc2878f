"""Output-normalised TTT by kernels: blocks of 16 tokens, chunks of 64, segments of a long sequence. The slow set has them in all
that the other files test."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastweights.ops import output_normalized_ttt
from fastweights.testing.contract.compare import assert_close, replace_tokens, values_and_gradients
from tests.fast_set import slow
from tests.ops.kernel_launches import plans_anew

from .cases import DEVICE, KERNEL_CASES, draw_states, exact, small

pytestmark = pytest.mark.kernels
CASE = KERNEL_CASES["output_normalized_ttt"]


@pytest.fixture(params=[False, True], ids=["sums", "products"])
def close(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Both kernels of the writes in float32, and how close they are: inner products cancel where answers are short."""
    name = "fastweights.kernels.output_normalized_ttt.rule.writes_by_products"
    monkeypatch.setattr(name, lambda _: request.param)
    with plans_anew():
        yield 2e-5 if request.param else 1e-5


# The kernel of 16 bits; the slow set has the other one too.
products_are_fast = pytest.mark.parametrize(
    "close", [pytest.param(False, id="sums", marks=pytest.mark.slow), pytest.param(True, id="products")], indirect=True
)


def check(close: float, time: int, started: bool, cu_seqlens: Tensor | None = None, **sizes: int) -> None:
    inputs = small(CASE, time, **sizes)
    count = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    states = draw_states(CASE, inputs, count) if started else None
    keywords = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    got = values_and_gradients(CASE, inputs, states, backend="triton", **keywords)
    for found, wanted in zip(got, exact(CASE, inputs, states, **keywords)):
        assert_close(found, wanted, close)


@pytest.mark.parametrize("started", [*slow(False), True])
@products_are_fast
def test_values_and_gradients(close: float, started: bool) -> None:
    """Over the edge of a chunk, with a last block that is not whole."""
    check(close, 67, started)


@products_are_fast
@pytest.mark.parametrize("time", [20, *slow(68)])
def test_packed_sequences(close: float, time: int) -> None:
    """Short ones, an empty one, one over the edge of a block or of a chunk; with groups of heads."""
    check(close, time, True, torch.tensor([0, 3, 3, time]), heads=1, value_heads=2)


@pytest.mark.slow
def test_segments_side_by_side(short_segments: None, close: float) -> None:
    """The outputs of a long sequence are read segment by segment once its writes are known."""
    check(close, 67, True)


@pytest.mark.parametrize(("key", "value", "short"), [(5, 20, 1), (33, 36, 1), (3, 2, 5)])
@products_are_fast
def test_any_width(close: float, key: int, value: int, short: int) -> None:
    """Answers of two channels may be short: their inner products cancel more, and on one CPU more than on another."""
    check(short * close, 3, True, key=key, value=value)


def test_half_precision() -> None:
    inputs = small(CASE, 20).map(Tensor.half)
    states = draw_states(CASE, inputs, 1)
    got, wanted = values_and_gradients(CASE, inputs, states, backend="triton"), exact(CASE, inputs, states)
    for found, right in zip(got, wanted):
        assert_close(found, right, 2e-3)


@pytest.mark.slow
@products_are_fast
def test_gamma_of_key_heads(close: float) -> None:
    """A gain per key head serves its group of value heads, and gathers their gradients."""
    inputs = small(CASE, 5, heads=2, value_heads=4)
    inputs = replace_tokens(inputs, gamma=inputs.tokens["gamma"][:, :, ::2])
    got, wanted = values_and_gradients(CASE, inputs, backend="triton"), exact(CASE, inputs)
    assert_close(got[0], wanted[0], close)
    assert_close(got[1], wanted[1], close)


@products_are_fast
def test_answers_without_a_direction(close: float) -> None:
    """A key across all keys before it has no answer: its write is the delta rule's, and nothing is NaN."""
    inputs = small(CASE, 20, key=24, value=6)
    inputs = replace_tokens(inputs, k=torch.eye(24, device=DEVICE)[:20, None][None])
    got, wanted = values_and_gradients(CASE, inputs, backend="triton"), exact(CASE, inputs)
    assert_close(got[0], wanted[0], close)
    assert_close(got[1], wanted[1], close)


@pytest.mark.slow  # tests/ops/test_decoding.py has the same in the fast set
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers(close: float, bad: float) -> None:
    """They reach what follows in their head, and nothing else; a query its own token alone. No state is infinite."""
    inputs = small(CASE, 4, heads=2).map(Tensor.requires_grad_)  # without gradients so few tokens are decoded
    clean, _ = CASE(inputs, backend="triton")
    for name, x in inputs.tokens.items():
        broken = x.detach().clone()
        broken[(0, 1, 1) + (2,) * (x.ndim - 3)] = bad
        o, (S,) = CASE(replace_tokens(inputs, **{name: broken}), backend="triton")
        assert torch.equal(o[:, :, 0], clean[:, :, 0]) and torch.equal(o[:, :1], clean[:, :1]), name
        assert o[0, 1, 1].isnan().all(), name
        assert o[0, 2:, 1].isnan().all() or name == "q", name
        assert S[0, 0].isfinite().all() and not S.isinf().any(), name
        if name == "q":
            assert torch.equal(o[:, 2:], clean[:, 2:])


def test_wide_heads_are_refused() -> None:
    q, v, gamma = (torch.ones(1, 2, 1, *n, device=DEVICE) for n in ((16,), (144,), ()))
    with pytest.raises(ValueError, match="at most 128 channels with backend 'triton'.*got 144; use backend 'torch'"):
        output_normalized_ttt(q, q, v, gamma, backend="triton")
