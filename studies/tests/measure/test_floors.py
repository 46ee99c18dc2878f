"""The probes of floors.py, compiled for Hopper without a GPU: they stay in registers."""

from __future__ import annotations

import pytest
from fastweights_studies.measure import floors

from tests.fast_set import fast_where
from tests.ops.kernel_launches import recorded

pytestmark = pytest.mark.compiler


@fast_where(lambda given: given["width"] == 64)
@pytest.mark.parametrize("width", floors.WIDTHS)
def test_every_part_launches_a_probe(width: int) -> None:
    """Of every op, with one launch each, but for copies."""
    parts = list(floors.parts_of(width, "cpu"))
    assert {op for part in parts for op in part.of} == {*floors.COPIED, *floors.ENCODE}
    for part in parts:
        assert len(list(recorded(part.work))) == (part.name != "copies")


@pytest.mark.slow
@pytest.mark.parametrize("width", floors.WIDTHS)
def test_nothing_is_spilled(width: int) -> None:
    works = [part.work for part in floors.parts_of(width, "cpu") if part.name != "copies"]
    for work in works:
        for one in recorded(work):
            assert not one.compile(90).stack, one.kernel.__name__
