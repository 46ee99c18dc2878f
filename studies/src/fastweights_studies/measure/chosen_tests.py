"""A plugin of pytest for tests on a GPU. It writes the names of the tests that are to run to the file CHOSEN_TESTS, and spreads
the processes of pytest-xdist over the GPUs that DEVICES names. All processes choose the same tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastweights.files import write_bytes

FILE = "CHOSEN_TESTS"
DEVICES = "DEVICES_OF_TESTS"  # comma-separated, as CUDA_VISIBLE_DEVICES has them


def pytest_configure() -> None:
    """Gives a process of pytest-xdist one of the GPUs, before it makes its first tensor there."""
    process = os.environ.get("PYTEST_XDIST_WORKER")
    if process:
        devices = os.environ[DEVICES].split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(process.removeprefix("gw")) % len(devices)]


def pytest_collection_finish(session: pytest.Session) -> None:
    write_bytes(Path(os.environ[FILE]), json.dumps([item.nodeid for item in session.items]).encode())
