"""Every op keeps the contract: a new rule inherits all of it by its name in fastweights/ops/__init__.py."""

from fastweights.testing.cases import OPS
from fastweights.testing.contract import *  # noqa: F403
from fastweights.testing.contract import contract_of

pytest_generate_tests = contract_of(*OPS)
