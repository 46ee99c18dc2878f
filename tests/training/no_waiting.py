"""What a training does for the case that the power fails, and for the memory of large models: tests of small ones need not wait
for it. A conftest.py that imports the fixture has it in all tests of its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

__all__ = ["no_waiting"]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Files are not flushed to the disk, of which no test could see anything, and accelerate collects no garbage of all that has
    been imported at the end of every training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which a closed file is still an error for
        if "accelerate.utils.memory" in sys.modules:
            patch.setattr(sys.modules["accelerate.utils.memory"], "gc", SimpleNamespace(collect=int))
        yield
