"""The judge of decoding takes every op that has a form in place, and finds its error against float64."""

from __future__ import annotations

import pytest
import torch
from fastweights_studies.measure.judge import decoding
from fastweights_studies.measure.judge.accuracy import over_budget
from fastweights_studies.measure.judge.cases import CASES, Case, Sizes

SIZES = Sizes(B=3, T=1, H=2, K=8, V=8)


def test_every_op_in_place_is_judged() -> None:
    from fastweights import ops

    judged = {case.op.__name__ for case in CASES.values()}
    in_place = {name for name in ops.OPS if hasattr(ops, f"{name}_")}
    steps = {"delta_product", "dplr_delta_rule"}  # the kernel of `delta_rule` on every step
    second_sum, without_kernel = {"palimpsa_posterior"}, {"kalman_filter"}
    assert in_place - judged == steps | second_sum | without_kernel


IN_PLACE = [name for name, case in CASES.items() if decoding.ours(case, "torch") is not None]


def test_ops_without_a_form_in_place_are_judged_too() -> None:
    (name,) = set(CASES) - set(IN_PLACE)
    case: Case = CASES[name]
    inputs, states = case.draw(SIZES, torch.float32, "cpu", 3), case.draw_states(SIZES, SIZES.B, "cpu", 4)
    found = decoding.check(case, decoding.general(case, "torch"), False, inputs, states)
    assert name == "longhorn-elementwise" and set(found) == {"o", *case.states}
    assert not over_budget(found, torch.float32)


@pytest.mark.parametrize("name", IN_PLACE)
def test_errors_are_those_of_the_dtype(name: str) -> None:
    case: Case = CASES[name]
    inputs = decoding.copies(case.draw(SIZES, torch.float32, "cpu", 3))
    states = decoding.copies(case.draw_states(SIZES, SIZES.B, "cpu", 4))
    step = decoding.ours(case, "torch")
    assert step is not None
    found = decoding.check(case, step, True, inputs, states)
    assert set(found) == {"o", *case.states}
    assert not over_budget(found, torch.float32)
    wrong = decoding.check(case, lambda x, s: 1.01 * step(x, s), True, inputs, states)
    assert over_budget(wrong, torch.float32)
