"""What rows say of the setting of a recall training."""

from __future__ import annotations

from fastweights.training import RecallRun
from fastweights_studies.record import Plain

__all__ = ["setting_column"]

APART = ("mixer", "learning_rate", "seed")  # have fields of their own in a row


def setting_column(run: RecallRun) -> dict[str, Plain]:
    """The settings of a run that are single values and set. The size of first weights is always among them."""
    return {
        name: value
        for name, value in {**run.record(), "initializer_range": run.initializer_range}.items()
        if name not in APART and isinstance(value, (str, int, float)) and value is not None
    }
