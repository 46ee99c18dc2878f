"""Tables for the terminal."""

import math
from collections.abc import Sequence

from rich.table import Table

from ..layers import MIXERS
from ..results import LanguageResult, RecallResult, RecallSummary, summarize
from ..results.experiment import describe_experiment
from .naming import short_unit, task_of

__all__ = ["language_table", "mixers_table", "recall_table"]


def mixers_table() -> Table:
    """The mixers by name: what the memory does, its update, where it comes from."""
    table = Table(title="Mixers: memory S [K, V], key k, value v, decay a, gain beta", title_justify="left")
    table.add_column("name", no_wrap=True, style="bold")
    for header in ("summary", "equation", "source"):
        table.add_column(header, overflow="fold")
    for name, spec in MIXERS.items():
        table.add_row(name, spec.summary, spec.equation, spec.source)
    return table


def recall_table(results: Sequence[RecallResult]) -> Table:
    """The best accuracy of each mixer, one section for each number of pairs, the best mixer first."""
    rows = summarize(results)
    table = Table(
        title=f"Accuracy: {describe_experiment(results)}",
        caption=(
            f"Accuracy at the best learning rate (lr) of the grid. Chance: {task_of(results).guess}. State: numbers "
            "in memory per sequence, all layers. Undertrained: the loss was still falling at the end."
        ),
        title_justify="left",
        caption_justify="left",
    )
    for header in (short_unit(results), "mixer", "accuracy", "chance", "lr", "state", "params"):
        table.add_column(header, justify="left" if header == "mixer" else "right", no_wrap=True)
    table.add_column("notes")
    for pairs in sorted({row.pairs for row in rows}):
        table.add_section()
        for row in sorted((row for row in rows if row.pairs == pairs), key=lambda row: -(row.accuracy or 0.0)):
            table.add_row(
                str(pairs),
                row.mixer,
                _accuracy(row),
                f"{row.chance:.3f}",
                "-" if row.learning_rate is None else f"{row.learning_rate:g}",
                f"{row.state_size:,}",
                f"{row.parameters:,}",
                _notes(row),
            )
    return table


def language_table(results: Sequence[LanguageResult]) -> Table:
    """Held-out perplexity of every model, over all held-out rows and by context length."""
    lengths = [entry["length"] for entry in results[0].perplexities]
    table = Table(
        title=f"Held-out perplexity after {results[0].tokens:,} tokens",
        caption=(
            "Rows: packed documents, as in training; then texts of N tokens, by N. State: numbers in memory per sequence."
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


def _accuracy(row: RecallSummary) -> str:
    if row.accuracy is None:
        return "-"
    spread = "" if row.accuracy_std is None else f" ± {row.accuracy_std:.3f}"
    return f"{row.accuracy:.3f}{spread}"


def _notes(row: RecallSummary) -> str:
    notes = ["undertrained"] if row.undertrained else []
    if row.accuracy is not None and row.accuracy <= row.chance:
        notes.append("at chance")
    if row.diverged:
        notes.append(f"{row.diverged} of {row.runs} runs diverged")
    return ", ".join(notes)
