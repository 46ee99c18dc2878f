"""Runs and experiments that take a fraction of a second, and what to compare of their results."""

import dataclasses
from typing import Any

from fastweights.analysis import RecallResult
from fastweights.training import RecallExperiment, RecallRun

SMALL = {
    "task": "mqar-shuffled",
    "vocab_size": 16,
    "width": 8,
    "heads": 2,
    "layers": 1,
    "steps": 12,
    "batch_size": 4,
    "test_examples": 8,
    "evaluations": 2,
}


def small_run(**changes: Any) -> RecallRun:
    return RecallRun(**{**SMALL, "mixer": "gdn", "pairs": 2, "learning_rate": 0.01, **changes})


def small_experiment(**changes: Any) -> RecallExperiment:
    grid = {"mixers": ("linear",), "pairs": (2,), "learning_rates": (0.01,)}
    return RecallExperiment(**{**SMALL, **grid, **changes})


def numbers(result: RecallResult) -> dict[str, Any]:
    """All of a result but the times."""
    return {name: value for name, value in dataclasses.asdict(result).items() if not name.endswith("seconds")}
