"""Trainings have one thread, as in the workers, and their small models wait for nothing."""

import pytest

from .no_waiting import no_waiting

__all__ = ["no_waiting"]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    pass
