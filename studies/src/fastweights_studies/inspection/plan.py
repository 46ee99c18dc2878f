"""What an inspection would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights.checks import check_choice, check_size
from fastweights.models.loading import load_config, model_folder
from fastweights.outputs import check_folder, lock_path

from .inspect import MEASURES
from .page import written_inspection

__all__ = ["plan_inspection"]


def plan_inspection(
    model: Path, output: Path, *, tokens: int, every: int, measures: Sequence[str] | None, text: str
) -> dict[str, Any]:
    """The mixers of the model in a folder, what is measured, and where it goes. Weights and text are not read, and nothing is
    written.

    Args:
        measures: as for `inspect_model`.
        text: what the page calls the text.

    Raises:
        ValueError: no model of this library in the folder, an output that cannot be used, or an argument out of range.
    """
    for name in measures or ():
        check_choice("measures", name, tuple(MEASURES))
    check_size("every", every)
    with lock_path("--output", output):
        check_folder("--output", output, lambda: written_inspection(output), "inspection")
    config = load_config(model_folder(model, hybrids=False))
    return {
        "model": str(model), "mixers": [name for name, _ in config.mixers()], "measures": list(measures or MEASURES),
        "text": text, "tokens, at most": tokens, "every": every, "output": str(output),
    }  # fmt: skip
