"""Where the results are: in a checkout of the repository its files, else those that the wheel of the studies carries."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DOCS", "RESULTS", "ROOT", "SOURCES"]

SOURCES = Path(__file__).parents[1]  # what PYTHONPATH needs for these modules in other processes
ROOT = SOURCES.parents[1]  # of the repository
DOCS = ROOT / "docs"
_PACKAGED = Path(__file__).with_name("results")
RESULTS = _PACKAGED if _PACKAGED.is_dir() else ROOT / "studies" / "results"
