"""The layers of a saved Transformer that a hybrid is best made with: `fastweights convert --keep auto:N`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..conversion.folder import load_model, model_folder
from ..evaluation.text import HeldOutText
from ..models import linearize
from ..models.hybrid import FAMILIES
from ..models.loading import check_has_tokenizer, check_vocabulary, load_tokenizer
from ..results.distillation import LayerRanking
from .selection import SelectionSettings, rank_layers, rows_of_documents

__all__ = ["LENGTH", "rank_saved_layers"]

LENGTH = 512  # tokens of a row


def rank_saved_layers(
    source: str,
    output: Path,
    *,
    text: HeldOutText,
    tokens: int,
    to: str,
    keys: str = "shared",
    rope: bool = True,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> LayerRanking:
    """`rank_layers` for the hybrid of the model `source` without attention, as `linearize_folder` makes it, not trained.

    Args:
        source: a folder or a name on the hub.
        output: folder for the ranking, from which an interrupted one continues.
        text: held-out text; its first rows of 512 tokens are read.
        tokens: how many tokens of it at most.
        to, keys, rope, seed, options: as for `linearize`.

    Raises:
        ValueError: what `linearize_folder` or `rank_layers` refuse, a source without a tokenizer, or too little text.
    """
    settings = SelectionSettings(rows=max(tokens // LENGTH, 1), tokens=tokens)
    folder = model_folder(source, FAMILIES)
    check_has_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    teacher, _ = load_model(folder)
    check_vocabulary(folder, tokenizer, teacher.config)
    student: Any = linearize(teacher, to=to, keys=keys, rope=rope, seed=seed, **(options or {}))
    rows = rows_of_documents(
        text.documents(tokenizer), length=LENGTH, settings=settings, separator=tokenizer.eos_token_id
    )
    return rank_layers(student, teacher, rows, settings=settings, output=output, console=console)
