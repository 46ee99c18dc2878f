"""Where a library of the extra `ecosystem` is missing or older, the tests of this folder are skipped before they are imported.
All of them are slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1] / "pyproject.toml"


def missing() -> Iterator[str]:
    """What the extra asks for and this environment does not have."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, extras["ecosystem"]):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or found not in requirement.specifier:
            yield f"{requirement} (found {found})"


MISSING = ", ".join(missing())


class SkippedModule(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs {MISSING}; make test-ecosystem installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)
