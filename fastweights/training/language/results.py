"""What a training gave: one record a model, a file, and a table for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..._files import write_json

__all__ = ["LanguageResult", "load_result", "results_table", "save_result"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageResult:
    """One trained model and what was measured of it.

    Attributes:
        name: its mixer; "hybrid" where layers differ.
        folder: of the saved model.
        run: the configuration, as plain values.
        parameters: numbers that were trained.
        state_size: numbers that the memories of all layers hold of a sequence of the run's length.
        steps, tokens: optimizer steps taken, and the tokens read in them.
        loss_steps, losses: the loss curve, nats a token; each point is the mean over the steps since the one before.
        held_out_steps, held_out_losses: the held-out loss in the course of training, the last one at the end.
        perplexities: held-out perplexity by context length: length, loss, last_loss, texts, joined of each, as
            `fastweights.evaluation.LengthPerplexity` says.
        continuation: what the model writes behind the run's prompt; None without one.
        seconds: wall time of this command's part of the training.
        versions, machine: of the libraries and the hardware.
    """

    name: str
    folder: str
    run: dict[str, Any]
    parameters: int
    state_size: int
    steps: int
    tokens: int
    loss_steps: list[int]
    losses: list[float]
    held_out_steps: list[int]
    held_out_losses: list[float]
    perplexities: list[dict[str, Any]]
    continuation: str | None
    seconds: float
    versions: dict[str, str]
    machine: dict[str, Any]

    @property
    def held_out_loss(self) -> float:
        """At the end of training."""
        return self.held_out_losses[-1]


def save_result(path: Path, result: LanguageResult) -> None:
    write_json(path, dataclasses.asdict(result))


def load_result(path: Path) -> LanguageResult:
    """ValueError: the file is damaged or of another version."""
    try:
        return LanguageResult(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"result {path} is damaged or of another version: {error}; delete it to measure again"
        ) from None


def results_table(results: Sequence[LanguageResult]) -> Table:
    """Held-out perplexity of every model, over all held-out rows and by context length."""
    lengths = [entry["length"] for entry in results[0].perplexities]
    table = Table(
        title=f"Held-out perplexity after {results[0].tokens:,} tokens",
        caption=(
            "Rows: packed documents, as in training; then texts of N tokens, by N. State: numbers a sequence holds in memory."
        ),
        title_justify="left",
        caption_justify="left",
    )
    for header in ("model", "params", "state", "rows", *(f"{length:,}" for length in lengths)):
        table.add_column(header, justify="left" if header == "model" else "right", no_wrap=True)
    for result in results:
        losses = [result.held_out_loss, *(entry["loss"] for entry in result.perplexities)]
        perplexities = [f"{math.exp(loss):.4g}" for loss in losses]
        table.add_row(result.name, f"{result.parameters:,}", f"{result.state_size:,}", *perplexities)
    return table
