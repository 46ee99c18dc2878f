"""Extreme values, bad numbers and dtypes: bad numbers reach what depends on them and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.testing import OpCase
from fastweights.testing.contract.compare import EXTREMES, relative_error, replace_tokens, values_and_gradients

from .cases import DEVICE, KERNEL_CASES, draw_states, exact, others_slow, small, some_slow

pytestmark = pytest.mark.kernels
EXACT = 0.0 if DEVICE == "cpu" else 1e-5  # on a GPU the form for bad numbers adds in another order


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_finite_and_agree(case: OpCase, extreme: str) -> None:
    inputs = small(case, 70 if "decay" in extreme or extreme == "one key" else 20)
    changed = {name: EXTREMES[extreme](case.tokens[name], x) for name, x in inputs.tokens.items()}
    if all(changed[name] is inputs.tokens[name] for name in changed):
        pytest.skip("no such input")
    inputs = replace_tokens(inputs, **changed)
    got, gradients = values_and_gradients(case, inputs, backend="triton")
    assert all(x.isfinite().all() for x in (*got, *gradients))
    wanted, wanted_gradients = exact(case, inputs)
    for g, w in zip(got, wanted):
        assert relative_error(g, w) <= 1e-4
    largest = max(float(w.norm()) for w in wanted_gradients)
    for g, w in zip(gradients, wanted_gradients):  # a gradient of 0 is only 0 up to the rounding of the others
        assert (g - w).norm() <= 1e-3 * max(float(w.norm()), 1e-3 * largest)


def check_containment(case: OpCase, bad: float, time: int, at: int, packed: bool) -> None:
    """For each input one bad number in the last head, at a token of the row, or of its second sequence of three: o is NaN
    where a finite change of that number changes it in float64, and what it was where it cannot."""
    heads, end = (2, time - 5) if packed else (1, time)
    inputs = small(case, time, heads=heads)
    keywords = {"cu_seqlens": torch.tensor([0, 64, end, time])} if packed else {}
    clean, _ = case(inputs, backend="triton", **keywords)
    reference = inputs.map(lambda x: x.cpu().double())
    before, _ = case(reference, backend="torch", **keywords)
    for name, x in inputs.tokens.items():
        if (case.tokens[name].endswith("decay") or name == "g") and not math.isnan(bad):
            continue  # a positive log decay is refused, and -inf is decay 0
        place = (0, at, heads - 1) + (2,) * (x.ndim - 3)
        moved, broken = reference.tokens[name].clone(), x.clone()
        moved[place] = moved[place] * 0.9 - 0.01
        broken[place] = bad
        shifted, _ = case(replace_tokens(reference, **{name: moved}), backend="torch", **keywords)
        got, states = case(replace_tokens(inputs, **{name: broken}), backend="triton", **keywords)
        depends = ((shifted - before).abs() > 1e-13).to(DEVICE)
        assert depends.any(), name
        assert got[depends].isnan().all(), name
        untouched = torch.ones_like(depends)
        untouched[0, at:end, heads - 1] = False
        torch.testing.assert_close(got[untouched], clean[untouched], rtol=EXACT, atol=EXACT, msg=name)
        if case.tokens[name] == "value":
            assert not got[..., [c for c in range(got.shape[-1]) if c != 2]].isnan().any(), name
        if case.tokens[name] == "query":
            assert got[0, at + 1 :].isfinite().all(), name
        for state in states:
            if not state.is_floating_point():  # a count of tokens
                continue
            assert state.isinf().sum() == 0, name
            rest = state.clone()
            rest[1 if packed else 0, heads - 1] = 0
            assert rest.isfinite().all(), name


@others_slow("linear_attention-none", "delta_rule-head-write", "precondition_keys")
def test_bad_numbers_reach_what_depends_on_them_and_nothing_else(case: OpCase) -> None:
    check_containment(case, math.nan, time=75, at=66, packed=False)


@some_slow("preconditioned_delta_rule-channel")
@pytest.mark.parametrize("bad", [math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)], ids=str)
def test_infinities_are_bad_numbers_too(case: OpCase, bad: float) -> None:
    check_containment(case, bad, time=20, at=3, packed=False)


@some_slow("delta_rule-head-write", "preconditioned_delta_rule-channel", "precondition_keys")
def test_bad_numbers_stay_in_their_sequence_and_head(case: OpCase) -> None:
    check_containment(case, math.nan, time=75, at=66, packed=True)


@some_slow("delta_rule-head-write", "preconditioned_delta_rule-channel", "precondition_keys")
def test_bad_numbers_across_segments(case: OpCase, short_segments: None) -> None:
    check_containment(case, math.nan, time=200, at=66, packed=False)


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
@pytest.mark.parametrize("time", [3, 20])
def test_a_bad_initial_state_reaches_its_own_head_and_row(case: OpCase, time: int) -> None:
    inputs = small(case, time, batch=2, heads=2)
    states = draw_states(case, inputs, 2)
    clean, ends = case(inputs, initial_state=case.initial_state(states), backend="triton")
    for index, name in enumerate(case.states):
        broken = tuple(s.clone() for s in states)
        broken[index][(1, 0) + (1,) * (broken[index].ndim - 2)] = math.nan
        o, final = case(inputs, initial_state=case.initial_state(broken), backend="triton")
        assert o[1, :, 0].isnan().any(), name
        assert final[index][1, 0].isnan().any(), name
        o[1, :, 0] = clean[1, :, 0]
        assert torch.equal(o, clean), name
        for state, end in zip(final, ends):
            state[1, 0] = end[1, 0]
            assert torch.equal(state, end), name


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
def test_a_bad_number_makes_the_gradient_bad(case: OpCase) -> None:
    """A loss over a NaN output must not leave finite gradients behind: training would continue with wrong ones."""
    inputs = small(case, 10)
    for name in inputs.tokens:
        broken = inputs.tokens[name].clone()
        broken.view(-1)[broken.numel() // 2] = math.nan
        _, gradients = values_and_gradients(case, replace_tokens(inputs, **{name: broken}), backend="triton")
        assert any(g.isnan().any() for g in gradients), name


@some_slow("preconditioned_delta_rule-channel", "precondition_keys")
@pytest.mark.parametrize(
    ("values", "gates"),
    [(torch.float16, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.float16)],
    ids=str,
)
def test_gates_may_be_more_or_less_precise(case: OpCase, values: torch.dtype, gates: torch.dtype) -> None:
    kinds = {name: "gate" in kind or "decay" in kind for name, kind in case.tokens.items()}
    if not any(kinds.values()):
        pytest.skip("the rule has no gate")
    if values == torch.float16 and case.parameters and DEVICE == "cpu":
        pytest.skip("the interpreter lacks the fast logarithm that the preconditioner takes for low precision")
    drawn = small(case, 20)
    inputs = replace_tokens(drawn, **{name: x.to(gates if kinds[name] else values) for name, x in drawn.tokens.items()})
    (o, *states), gradients = values_and_gradients(case, inputs, backend="triton")
    assert o.dtype == values and all(s.dtype == torch.float32 for s in states)
    assert [g.dtype for g in gradients] == [x.dtype for x in (*inputs.tokens.values(), *inputs.parameters.values())]
    # Without gradients a few tokens are read one after the other.
    few = inputs.at((slice(None), slice(0, 7)))
    pairs = [(got, want) for got, want in zip(([o, *states], gradients), exact(case, inputs))]
    pairs.append((flat(case(few, backend="triton")), flat(case(few.map(Tensor.double), backend="reference"))))
    for got, wanted in pairs:
        for g, w in zip(got, wanted, strict=True):
            assert relative_error(g, w) <= (3e-3 if torch.float16 in (g.dtype, values) else 1e-5)


def flat(results: tuple[Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [results[0], *results[1]]


@some_slow("preconditioned_delta_rule-channel")
def test_autocast_changes_nothing(case: OpCase) -> None:
    inputs = small(case, 20)
    plain = values_and_gradients(case, inputs, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = values_and_gradients(case, inputs, backend="triton")
    assert all(torch.equal(a, b) for xs, ys in zip(plain, cast) for a, b in zip(xs, ys))


def test_preconditioner_with_other_bound_and_eps() -> None:
    case = KERNEL_CASES["preconditioned_delta_rule-head"]
    inputs = small(case, 20)
    options = {"bound": 1.2, "eps": 1e-3, "scale": -0.7}
    got = values_and_gradients(case, inputs, backend="triton", **options)
    for pair in zip(got, exact(case, inputs, **options)):
        for g, w in zip(*pair):
            assert relative_error(g, w) <= 1e-5
