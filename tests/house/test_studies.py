"""The library knows no study: it imports none, and names neither one nor where results are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastweights

PACKAGE = Path(fastweights.__file__).parent
# The one place that names the package, for commands that are missing without it.
ALLOWED = {"cli/plugins.py": {"fastweights-studies"}}
NAMES = re.compile(r"fastweights[_-]studies|\bstudies/|\bbenchmarks?/|\bclaims? [CS]\d|\bresults/\w+\.json\b")


def studies_named(text: str) -> set[str]:
    return set(NAMES.findall(text))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_study_is_named(path: Path) -> None:
    assert studies_named(path.read_text()) <= ALLOWED.get(str(path.relative_to(PACKAGE)), set())


@pytest.mark.parametrize(
    "text",
    [
        "import fastweights_studies.record",
        "pip install fastweights-studies",
        "see benchmarks/kernels.py",
        "of claim C29",
    ],
)
def test_a_study_is_found(text: str) -> None:
    assert studies_named(text)
