"""Dtypes, extreme values and bad numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ..cases import OpCase, OpInputs
from .compare import EXTREMES, mix_extremes, relative_error, replace_tokens, values_and_gradients

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(case: OpCase, backend: str, dtype: torch.dtype) -> None:
    """Low-precision inputs, float32 inside: the error is that of rounding o; states in float32 (float64 for float64)."""
    # The loop has no chunks: what more tokens would show is rounding that adds up, and only bfloat16 has enough of it.
    inputs = case.draw(dtype=dtype, time=20 if backend == "reference" and dtype != torch.bfloat16 else 70)
    (o, *states), gradients = values_and_gradients(case, inputs, backend=backend)
    exact, wanted_gradients = values_and_gradients(case, inputs.map(Tensor.double), backend="reference")
    assert o.dtype == dtype
    for state in states:
        if state.is_floating_point():
            assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for got, wanted in zip([o, *states], exact):
        assert relative_error(got, wanted) <= DTYPES[dtype]
    for got, wanted in zip(gradients, wanted_gradients):
        assert got.dtype == dtype
        assert relative_error(got, wanted) <= 5 * DTYPES[dtype]


def test_gates_may_be_more_precise_than_values(case: OpCase) -> None:
    low = case.draw(dtype=torch.bfloat16)
    gates = {
        name: x.float() for name, x in low.tokens.items() if case.tokens[name] == "gate" or "decay" in case.tokens[name]
    }
    if not gates:
        pytest.skip("the rule has no gate")
    mixed = OpInputs({**low.tokens, **gates}, low.parameters, low.options)
    assert case(mixed, backend="torch")[0].dtype == torch.bfloat16


def test_autocast_changes_nothing(case: OpCase, backend: str) -> None:
    inputs = case.draw(dtype=torch.float32)
    plain, _ = case(inputs, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = case(inputs, backend=backend)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("time", [69, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_finite_and_agree(case: OpCase, extreme: str, time: int) -> None:
    inputs = case.draw(dtype=torch.float32, time=time)
    changed = {name: EXTREMES[extreme](case.tokens[name], x) for name, x in inputs.tokens.items()}
    if all(changed[name] is inputs.tokens[name] for name in changed):
        pytest.skip("no such input")
    check_extremes(case, replace_tokens(inputs, **changed))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_mixed_extremes_are_finite_and_agree(case: OpCase, seed: int) -> None:
    check_extremes(case, mix_extremes(case, case.draw(dtype=torch.float32, time=69, seed=seed), seed))


def check_extremes(case: OpCase, inputs: OpInputs) -> None:
    """The chunkwise form in float32 is finite, and the loop's in float64."""
    got, gradients = values_and_gradients(case, inputs, backend="torch")
    assert all(x.isfinite().all() for x in (*got, *gradients))
    wanted, wanted_gradients = values_and_gradients(case, inputs.map(Tensor.double), backend="reference")
    for g, w in zip(got, wanted):
        assert relative_error(g, w) <= 1e-4
    largest = max(float(w.norm()) for w in wanted_gradients)
    for g, w in zip(gradients, wanted_gradients):  # a gradient of 0 is only 0 up to the rounding of the others
        assert (g - w).norm() <= 1e-3 * max(float(w.norm()), 1e-3 * largest)


@pytest.mark.parametrize("time", [2048, pytest.param(65_536, marks=pytest.mark.slow)])
def test_long_sequence_stays_finite(case: OpCase, time: int) -> None:
    inputs = case.draw(batch=1, heads=1, time=time, key=8, value=8, dtype=torch.float32)
    o, states = case(inputs, backend="torch")
    assert o.isfinite().all()
    assert all(s.isfinite().all() for s in states)


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_bad_numbers_reach_what_depends_on_them_and_nothing_else(case: OpCase, backend: str, packed: bool) -> None:
    """For each input, one bad number at the third token behind a chunk, nine from the end: earlier tokens, other rows or
    sequences and other heads keep their values bit by bit, and o is NaN where a finite change of that number would have
    changed it."""
    before = 4 if backend == "reference" else 64  # the loop has no chunks
    place, end, time = before + 2, before + 6, before + 11
    inputs = case.draw(batch=1 if packed else 2, time=time)
    edges = torch.tensor([0, before, end, end, time])  # an empty sequence behind that of the bad number
    keywords = {"cu_seqlens": edges} if packed else {}
    clean, _ = case(inputs, backend=backend, **keywords)
    for name, x in inputs.tokens.items():
        at = (0, place, 1) + (2,) * (x.ndim - 3)
        moved = x.clone()
        moved[at] = moved[at] * 0.9 - 0.01
        shifted, _ = case(replace_tokens(inputs, **{name: moved}), backend=backend, **keywords)
        depends = (shifted - clean).abs() > 1e-13
        assert depends.any(), name
        assert not depends[:, :place].any()
        untouched = torch.ones_like(depends)
        untouched[0, place : end if packed else time, 1] = False
        for bad in BAD:
            if "decay" in case.tokens[name] and not math.isnan(bad):
                continue  # a positive log decay is refused, and one of -inf is decay 0, a legal number
            broken, which = x.clone(), f"{bad} in {name}"
            broken[at] = bad
            got, states = case(replace_tokens(inputs, **{name: broken}), backend=backend, **keywords)
            assert got[depends].isnan().all(), which
            assert torch.equal(got[untouched], clean[untouched]), which
            if case.tokens[name] == "value":
                other_columns = got[..., [c for c in range(got.shape[-1]) if c != 2]]
                assert not other_columns.isnan().any(), which
            if "query" in case.tokens[name]:
                assert got[0, place + 1 :].isfinite().all(), which
            for state in filter(Tensor.is_floating_point, states):
                rest = state.clone()
                rest[1 if packed else 0, 1] = 0
                assert rest.isfinite().all(), which


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_initial_state_reaches_its_own_head_and_row(case: OpCase, backend: str, bad: float) -> None:
    inputs = case.draw(time=9 if backend == "reference" else 70)  # the loop has no chunks
    _, states = case(inputs, backend=backend)
    for index, state in enumerate(states):
        if not state.is_floating_point():
            continue
        broken = state.clone()
        broken[(1, 0) + (1,) * (state.ndim - 2)] = bad
        given = case.initial_state(tuple(broken if i == index else s for i, s in enumerate(states)))
        o, final = case(inputs, initial_state=given, backend=backend)
        assert o[1, :, 0].isnan().any()
        assert final[index][1, 0].isnan().any()
        assert o[0].isfinite().all() and o[:, :, 1].isfinite().all()


def test_a_bad_number_makes_the_gradient_bad(case: OpCase, backend: str) -> None:
    """A loss over a NaN output must not leave finite gradients behind: training would continue with wrong ones."""
    inputs = case.draw(time=10)
    name = next(iter(inputs.tokens))
    broken = inputs.tokens[name].clone()
    broken[0, 5, 0, 0] = math.nan
    _, gradients = values_and_gradients(case, replace_tokens(inputs, **{name: broken}), backend=backend)
    assert any(g.isnan().any() for g in gradients)
