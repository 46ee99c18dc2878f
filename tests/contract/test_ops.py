"""Every op keeps the contract: a new rule inherits all of it by its name in fastweights/ops/__init__.py."""

import pytest

from fastweights.testing.cases import OPS
from fastweights.testing.contract import *  # noqa: F403
from fastweights.testing.contract import contract_of

pytest_generate_tests = contract_of(*OPS)


# test_golden.py has the golden values of both in the fast set.
@pytest.fixture(params=[pytest.param("reference", marks=pytest.mark.slow), "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
