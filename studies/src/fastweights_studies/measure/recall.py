"""What rows say of the setting of a recall training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights_studies.record import Plain

__all__ = ["setting_column"]

APART = ("mixer", "learning_rate", "seed")  # have fields of their own in a row


def setting_column(run: Mapping[str, Any]) -> dict[str, Plain]:
    """The settings of a run, as `RecallRun.record()` has them, that are single values and set."""
    return {
        name: value
        for name, value in run.items()
        if name not in APART and isinstance(value, (str, int, float)) and value is not None
    }
