"""The contract that every op keeps, as tests of pytest. A module of tests inherits all of them for ops of its own:

    from fastweights.testing.contract import *

    pytest_generate_tests = contract_of(my_op)

They need pytest and hypothesis, which the extra `test` installs. Tests that take long have the mark `slow`.
"""

import pytest

_MODULES = ("bad_input", "by_kernels", "compare", "compiling", "divided", "equivalence", "gradients", "numbers")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from .bad_input import *  # noqa: E402, F403
from .compiling import *  # noqa: E402, F403
from .divided import *  # noqa: E402, F403
from .equivalence import *  # noqa: E402, F403
from .forms import contract_of  # noqa: E402
from .gradients import *  # noqa: E402, F403
from .numbers import *  # noqa: E402, F403


@pytest.fixture(params=["reference", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """The forms that run on any machine; what depends on neither takes none."""
    return request.param


__all__ = ["backend", "contract_of", *(name for name in dir() if name.startswith("test_"))]
