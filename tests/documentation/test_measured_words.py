"""Measured figures in the sentences of pages that are written by hand are those of the result files."""

from __future__ import annotations

import json
from typing import Any

import page_parts
import pytest

from .site import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_bytes())


def words(page: str) -> str:
    """The text of a page without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def test_tables_about_cpus_are_generated() -> None:
    assert page_parts.CPU.read_text() == page_parts.render(page_parts.CPU), f"run {page_parts.COMMAND}"


def test_recall_and_language_models_on_cpus() -> None:
    text, runs, models = words("docs/cpu.md"), result("recall_default")["runs"], result("lm_default")
    taken = sum(run["cpu_seconds"] for run in runs)
    assert f"Its {len(runs)} trainings took {taken:.0f} seconds of processor time" in text
    assert f"They took {sum(model['seconds'] for model in models):.0f} seconds together" in text
    (steps,), (tokens,) = ({model[what] for model in models} for what in ("steps", "tokens"))
    assert f"for {steps} steps on {tokens:,} tokens" in text
    softmax = {row["pairs"]: row for row in result("recall_readme")["summary"] if row["mixer"] == "softmax"}
    assert f"softmax has {softmax[4]['accuracy']:.3f} on 4 pairs and is at chance on 8 and 16" in text
    assert all(softmax[pairs]["accuracy"] == pytest.approx(1 / pairs, abs=0.01) for pairs in (8, 16))
