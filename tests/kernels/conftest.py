"""Contract tests of the kernels run over every form of every op that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from fastweights.kernels.availability import HAS_TRITON
from fastweights.testing import OpCase
from tests.ops.kernel_launches import plans_anew

from .cases import KERNEL_CASES, REPEATED, SLOW


@pytest.fixture(
    params=[pytest.param(x, marks=pytest.mark.slow if x in (*SLOW, *REPEATED) else ()) for x in KERNEL_CASES]
)
def case(request: pytest.FixtureRequest) -> OpCase:
    return KERNEL_CASES[request.param]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sequences are cut into segments of one chunk, as only long ones are otherwise."""
    if HAS_TRITON:
        for module in ("common.delta_rule.sizes", "posterior.memory"):
            monkeypatch.setattr(f"fastweights.kernels.{module}.MIN_SEGMENT_CHUNKS", 1)
    with plans_anew() if HAS_TRITON else nullcontext():
        yield
