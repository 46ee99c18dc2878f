"""Every op keeps the contract: a new rule inherits all of it by its name in fastweights/ops/__init__.py."""

import pytest

from fastweights.ops import OPS
from fastweights.testing.contract import *  # noqa: F403
from fastweights.testing.contract import contract_of

pytest_generate_tests = contract_of(*OPS.values())


# The reference repeats the contract in the slow set. In the fast set test_golden.py compares it with the golden values.
@pytest.fixture(params=[pytest.param("reference", marks=pytest.mark.slow), "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
