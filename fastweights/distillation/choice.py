"""The layers of a saved Transformer that a hybrid is best made with: `fastweights convert --keep auto:N`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..conversion.folder import load_model, model_folder
from ..conversion.linearized_folder import RUN_FILE, linearize_folder
from ..evaluation import load_language_model
from ..evaluation.text import HeldOutText
from ..models import linearize
from ..models.hybrid import FAMILIES
from ..models.loading import check_has_tokenizer, check_vocabulary, load_tokenizer
from ..results.distillation import LayerRanking
from ..training.language import load_run
from .distill import distill
from .run import DistillRun
from .selection import SelectionSettings, rank_layers, rows_of_documents

__all__ = ["LENGTH", "rank_saved_layers"]

LENGTH = 512  # tokens of a row


def rank_saved_layers(
    source: str,
    output: Path,
    *,
    text: HeldOutText,
    settings: SelectionSettings,
    to: str,
    keys: str = "shared",
    rope: bool = True,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> LayerRanking:
    """`rank_layers` for the hybrid of the model `source` without attention, as `linearize_folder` makes it.

    Args:
        source: a folder or a name on the hub.
        output: folder for the ranking, from which an interrupted one continues.
        text: held-out text; rows of 512 tokens are read.
        settings: the budget. Its training_steps are those of the first stage in the run file of the hybrid, by which the memories
            learn before they are ranked.
        to, keys, rope, seed, options: as for `linearize`.

    Raises:
        ValueError: what `linearize_folder` or `rank_layers` refuse, a source without a tokenizer, or too little text.
    """
    settings.count(LENGTH)  # refuses too few before any model is read
    folder = model_folder(source, FAMILIES)
    check_has_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    teacher, _ = load_model(folder)
    check_vocabulary(folder, tokenizer, teacher.config)
    choices: dict[str, Any] = {"to": to, "keys": keys, "rope": rope, "seed": seed}
    student: Any = linearize(teacher, **choices, **(options or {}))
    rows = rows_of_documents(
        text.documents(tokenizer), length=LENGTH, settings=settings, separator=tokenizer.eos_token_id
    )

    def train(hybrid: Any, steps: int) -> Any:
        return _train(source, output, steps, {**choices, "options": options}, console)

    return rank_layers(student, teacher, rows, settings=settings, output=output, train=train, console=console)


def _train(source: str, output: Path, steps: int, choices: Mapping[str, Any], console: Console | None) -> Any:
    """The hybrid without attention after so many steps of stage (a), on the text of its run file. Made again from the same
    choices it is the same one, so that an interrupted training continues."""
    start = output / "hybrid"
    linearize_folder(source, start, **choices, steps=steps, overwrite=True)
    run = load_run(start / RUN_FILE, kind=DistillRun)
    run = dataclasses.replace(
        run, output=str(output / "trained"), stages=run.stages[:1], context_lengths=(), needles=()
    )
    results = distill(run, console=console)
    assert results is not None  # there is one process
    return load_language_model(results[-1].folder)[0]
