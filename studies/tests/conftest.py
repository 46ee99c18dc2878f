"""The marks and fixtures of the library's tests, for the tests of the studies too."""

from tests.conftest import pytest_collection_modifyitems, signals_arrive

__all__ = ["pytest_collection_modifyitems", "signals_arrive"]
