"""The wheel of the studies carries the results that its commands show without a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fastweights_studies.places import RESULTS, ROOT

BUILD = "import sys, hatchling.build as backend; print(backend.build_wheel(sys.argv[1]))"


def test_the_wheel_has_the_results_of_claims_and_leaderboard(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs pip install 'fastweights[test]'")
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path], cwd=ROOT / "studies", capture_output=True, text=True, check=True
    )
    packed = set(zipfile.ZipFile(tmp_path / ended.stdout.split()[-1]).namelist())
    for folder in ("claims", "leaderboard"):
        names = {path.name for path in (RESULTS / folder).iterdir()}
        assert {f"fastweights_studies/results/{folder}/{name}" for name in names} <= packed
    assert "fastweights_studies/commands/reproduce.py" in packed
