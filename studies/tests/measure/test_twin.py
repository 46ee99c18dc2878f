"""The same-precision twin rounds where it should and computes the same function."""

from __future__ import annotations

import pytest
import torch
from fastweights_studies.measure.judge.accuracy import cotangents, errors, in_float64, over_budget, over_twin, results
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.twin import HAS_TWIN, TensorCores, twin_results

SIZES = Sizes(B=2, T=80, H=2, K=32, V=24, HV=4)


def both(name: str, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the twin and of the chunkwise form."""
    case = CASES[name]
    inputs, states = case.draw(SIZES, dtype, "cpu", 0), case.draw_states(SIZES, SIZES.B, "cpu", 1)
    given = cotangents(case, inputs, states, 2)
    wanted = results(case, in_float64(inputs), in_float64(states), in_float64(given), "torch")
    twin, ours = twin_results(case, inputs, states, given), results(case, inputs, states, given, "torch")
    assert twin.keys() == ours.keys() == wanted.keys()
    assert all(twin[key].dtype == ours[key].dtype for key in twin)
    return errors(twin, wanted), errors(ours, wanted)


@pytest.mark.parametrize("name", sorted(HAS_TWIN))
def test_without_rounding_it_is_the_same_function(name: str) -> None:
    twin, _ = both(name, torch.float32)
    assert max(twin.values()) < 1e-5


@pytest.mark.parametrize("name", sorted(HAS_TWIN))
def test_half_precision_stays_within_budget_and_is_no_excuse(name: str) -> None:
    twin, ours = both(name, torch.bfloat16)
    assert not over_budget(twin, torch.bfloat16)
    assert not over_budget(ours, torch.bfloat16)
    assert not over_twin(ours, twin, torch.bfloat16)
    assert 1.5e-3 < twin["o"] < 5e-3


def test_products_round_their_operands_forwards_and_backwards() -> None:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    d = torch.randn(3, 4, 6)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.detach().bfloat16().float()

    with TensorCores(torch.bfloat16):
        product = a @ b
    da, db = torch.autograd.grad(product, (a, b), d)
    assert torch.equal(product, rounded(a) @ rounded(b))
    assert torch.equal(da, rounded(d) @ rounded(b).mT)
    assert torch.equal(db, rounded(a).mT @ rounded(d))
