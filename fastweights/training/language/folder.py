"""The output folder of one training: which file is where, and whether the run may use the folder."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..output_folder import OwnedFolder, as_stored
from .run import LanguageRun

__all__ = ["LanguageFolder", "is_main_process", "world_size"]

# What a run may change when it is continued: the numbers do not depend on it.
FREE = ("output", "cache", "keep_checkpoints", "context_lengths", "context_texts", "prompt", "tensorboard")


def world_size() -> int:
    """Processes of this training, as torchrun and accelerate launch tell them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the one process that writes."""
    return int(os.environ.get("RANK", "0")) == 0


class LanguageFolder:
    """A folder that holds one training and nothing else.

    run.json                 the configuration that the numbers depend on
    log.jsonl                a line for every point of the loss curve and of the held-out loss
    checkpoints/checkpoint-N where a training that was cut continues
    tensorboard/             the same points for TensorBoard, where it is asked for
    model/                   the trained model and its tokenizer
    result.json, *.png       what was measured, once training has ended
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.log = path / "log.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.result = path / "result.json"
        # Checkpoints are checked for themselves before they are continued from.
        self._owned = OwnedFolder(path, "run.json", "training", known=("checkpoints",))

    @contextmanager
    def opened(self, run: LanguageRun, *, overwrite: bool) -> Iterator[None]:
        """Hold the folder for `run`, new or continued. Only the main process writes.

        Raises:
            ValueError: the folder cannot be written to, is in use, or holds other files; or, without `overwrite`, another
                training. What it held is then as it was.
        """
        if not is_main_process():
            yield
            return
        with self._owned.held_for(_identity(run), clear=self._clear if overwrite else None):
            self.checkpoints.mkdir(exist_ok=True)
            yield

    def _clear(self) -> None:
        for folder in (self.checkpoints, self.tensorboard, self.model):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.log, self.result, *self.path.glob("*.png")):
            file.unlink(missing_ok=True)


def _identity(run: LanguageRun) -> dict[str, Any]:
    """What the numbers of a training depend on."""
    fields = {name: value for name, value in dataclasses.asdict(run).items() if name not in FREE}
    rows = fields.pop("batch_size") * fields.pop("accumulation") * world_size()
    return as_stored({**fields, "rows_a_step": rows})
