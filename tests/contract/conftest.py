"""The contract every op keeps, run over fastweights.testing.CASES: a new rule inherits all of it by being listed there."""

from __future__ import annotations

import pytest

from fastweights.testing import CASES, OpCase


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> OpCase:
    return CASES[request.param]


@pytest.fixture(params=["reference", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
