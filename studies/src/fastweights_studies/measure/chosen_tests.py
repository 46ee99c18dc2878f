"""A plugin of pytest that writes the names of the tests that are to run to the file CHOSEN_TESTS. All processes of pytest-xdist
choose the same ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastweights.files import write_bytes

FILE = "CHOSEN_TESTS"


def pytest_collection_finish(session: pytest.Session) -> None:
    write_bytes(Path(os.environ[FILE]), json.dumps([item.nodeid for item in session.items]).encode())
