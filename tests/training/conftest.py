"""Trainings have one thread, as in the workers."""

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    pass
