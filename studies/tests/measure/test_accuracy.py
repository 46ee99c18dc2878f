"""What an error may be."""

from __future__ import annotations

import math

import pytest
import torch
from fastweights_studies.measure.judge.accuracy import budget, errors, over_budget, over_twin, pooled


@pytest.mark.parametrize(
    "name, allowed", [("o", 5e-3), ("S", 5e-3), ("dq", 8e-3), ("dS", 8e-3), ("dbeta", 2e-2), ("dg", 2e-2)]
)
def test_budgets(name: str, allowed: float) -> None:
    assert budget(name, torch.bfloat16) == allowed
    assert budget(name, torch.float32) == 1e-4


@pytest.mark.parametrize("error, passes", [(4.9e-3, True), (6e-3, False), (math.nan, False)])
def test_over_budget(error: float, passes: bool) -> None:
    assert (not over_budget({"o": error}, torch.bfloat16)) == passes


@pytest.mark.parametrize(
    "error, twin, passes",
    [
        (4e-3, 2.5e-3, True),
        (4.9e-3, 2e-3, False),
        (3e-3, 1e-9, True),  # twice the rounding of a result is always allowed
        (math.nan, 2e-3, False),
    ],
)
def test_twice_the_twin(error: float, twin: float, passes: bool) -> None:
    assert (not over_twin({"o": error}, {"o": twin}, torch.bfloat16)) == passes


def test_draws_are_pooled_by_their_squares_and_hide_nothing() -> None:
    assert pooled([{"o": 3.0, "S": 1.0}, {"o": 4.0, "S": 1.0}]) == pytest.approx({"o": 12.5**0.5, "S": 1.0})
    assert math.isnan(pooled([{"o": 1.0}, {"o": math.nan}])["o"])


def test_error_is_relative_and_sees_what_is_no_number() -> None:
    x = torch.randn(50)
    assert errors({"x": 1.01 * x}, {"x": x.double()})["x"] == pytest.approx(0.01, rel=1e-4)
    assert math.isnan(errors({"x": x * math.nan}, {"x": x.double()})["x"])
    assert errors({"x": x}, {"x": torch.zeros(40)})["x"] == math.inf
    assert errors({"x": 1e-9 * x}, {"x": torch.zeros(50)})["x"] < 1e-2
