"""The folders of trainings that a study has made, and may delete."""

from __future__ import annotations

from pathlib import Path

from fastweights.outputs import refuse_links
from fastweights.training.recall.folder import ExperimentFolder

__all__ = ["remove_trainings"]


def remove_trainings(folder: Path) -> None:
    """Delete what trainings wrote in a folder and in those below it, and nothing else.

    Raises:
        ValueError: a link leads to one, or another process has it.
    """
    from fastweights.training.language.folder import LanguageFolder  # here: the command's help must not wait for it

    refuse_links("output", folder)
    for kind in (ExperimentFolder, LanguageFolder):
        for marker in sorted(folder.rglob(kind.MARKER)):
            kind(marker.parent).remove()
