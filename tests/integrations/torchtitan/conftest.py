"""Without torchtitan the tests of this folder that train with it are skipped before they are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastweights import environment
from fastweights.integrations.torchtitan import TESTED

MISSING = not environment.is_version(environment.installed_version("torchtitan"), TESTED)
WITHOUT = {"test_without.py"}


class SkippedModule(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs torchtitan {TESTED}; make test-torchtitan installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    skipped = MISSING and module_path.name not in WITHOUT
    return SkippedModule.from_parent(parent, path=module_path) if skipped else None
