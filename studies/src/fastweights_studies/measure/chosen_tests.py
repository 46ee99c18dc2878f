"""A plugin of pytest that writes the names of the tests that are to run to the file CHOSEN_TESTS. All processes of pytest-xdist
choose the same ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastweights_studies.measure.environment import write_json

FILE = "CHOSEN_TESTS"


def pytest_collection_finish(session: pytest.Session) -> None:
    write_json(Path(os.environ[FILE]), [item.nodeid for item in session.items])
