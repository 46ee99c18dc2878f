"""Trainings of an earlier command, in folders below its own."""

from __future__ import annotations

from pathlib import Path

from ..outputs import refuse_links
from .folder import ExperimentFolder

__all__ = ["remove_trainings"]


def remove_trainings(folder: Path) -> None:
    """Delete what trainings wrote in a folder and in those below it, and nothing else.

    Raises:
        ValueError: a link leads to one, or another process has it.
    """
    refuse_links("output", folder)
    for marker in sorted(folder.rglob("experiment.json")):
        ExperimentFolder(marker.parent).remove()
    for marker in sorted(folder.rglob("run.json")):
        from .language.folder import LanguageFolder  # here: who trains none may not have its packages

        LanguageFolder(marker.parent).remove()
