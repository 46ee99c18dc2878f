"""Every recall task in a common size and in a long one, for tests of what holds for all of them."""

import pytest

from fastweights.data import TASKS, RecallTask, make_task


@pytest.fixture(params=[f"{name}-{size}" for name in TASKS for size in ("shortest", "long")])
def task(request: pytest.FixtureRequest) -> RecallTask:
    name, _, size = request.param.rpartition("-")
    return make_task(name, pairs=5, length=None if size == "shortest" else 50, vocab_size=64)
