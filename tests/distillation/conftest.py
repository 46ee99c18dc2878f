"""Models and text made once."""

import pytest
import torch

from ..training.no_waiting import no_waiting
from .runs import distill_run, write_models

__all__ = ["no_waiting"]


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are those of the processes of other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a teacher, its student and text."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
def make_run(models, tmp_path):
    """`distill_run` with an output folder of its own."""
    return lambda name="out", **changes: distill_run(models, output=str(tmp_path / name), **changes)
