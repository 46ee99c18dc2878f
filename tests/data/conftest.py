"""Every task of tokens in a common size and in a long one, for tests of what holds for all of them."""

import pytest

from fastweights.data import TASKS, RecallTask, make_task

# Of few bits a batch would hold many sequences twice.
SHORT = {"parity": {"pairs": 40, "length": 40}, "s3": {"pairs": 20, "length": 20}, "s5": {"pairs": 10, "length": 10}}
LONG = {name: {"pairs": 50, "length": 50} for name in SHORT}


NAMES = [name for name, kind in TASKS.items() if issubclass(kind, RecallTask)]


@pytest.fixture(params=[f"{name}-{size}" for name in NAMES for size in ("shortest", "long")])
def task(request: pytest.FixtureRequest) -> RecallTask:
    name, _, size = request.param.rpartition("-")
    if size == "shortest":
        options = {"pairs": 5, "length": None, **SHORT.get(name, {})}
    else:
        options = {"pairs": 5, "length": 50, **LONG.get(name, {})}
    return make_task(name, vocab_size=120 if name == "s5" else 64, **options)
