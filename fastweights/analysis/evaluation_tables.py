"""Tables of an evaluation of a text model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from ..results import HarnessScore, LengthPerplexity

__all__ = ["evaluation_tables", "harness_table", "perplexity_table", "retrieval_table"]


def evaluation_tables(results: Mapping[str, Sequence[Any]]) -> Iterator[Table]:
    """The tables of an evaluation's rows, by the names of the measures."""
    rest = dict(results)
    perplexity, harness = rest.pop("perplexity", ()), rest.pop("lm-eval", ())
    if perplexity:
        yield perplexity_table(perplexity)
    if rest:
        yield retrieval_table(rest)
    if harness:
        yield harness_table(harness)


def perplexity_table(rows: Sequence[LengthPerplexity]) -> Table:
    """One row per context length."""
    first = rows[0]
    joined = f", {first.joined} of them joined from shorter documents" if first.joined else ""
    table = _table(
        f"Perplexity by context length, {first.texts} text{'' if first.texts == 1 else 's'}{joined}",
        "Perplexity: of all tokens up to the length. Last tokens: of the last stretch before it alone.",
    )
    for header in ("length", "perplexity", "last tokens", "nats per token"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(f"{row.length:,}", f"{row.perplexity:,.2f}", f"{row.last_perplexity:,.2f}", f"{row.loss:.4f}")
    return table


def retrieval_table(results: Mapping[str, Sequence[Any]]) -> Table:
    """Recall and needle tasks: one row per task, one column per length.

    results: `WordRecall` or `NeedleRecall` rows by the name of the measure.
    """
    lengths = sorted({row.length for rows in results.values() for row in rows})
    table = _table(
        "Recall and retrieval by context length",
        "Recall tasks: part of the queries answered right. Needles: part found over all depths and, in brackets, the "
        "loss of the right answer in nats per token.",
    )
    table.add_column("task", no_wrap=True, style="bold")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for measure, rows in results.items():
        table.add_row(measure, *[_cell([row for row in rows if row.length == length]) for length in lengths])
    return table


def harness_table(scores: Sequence[HarnessScore]) -> Table:
    """One row per task and metric of lm-evaluation-harness."""
    table = Table(title="lm-evaluation-harness", title_justify="left")
    table.add_column("task", style="bold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for score in scores:
        table.add_row(score.task, score.metric, f"{score.value:.4f}")
    return table


def _cell(rows: Sequence[Any]) -> str:
    if not rows:
        return "-"
    if hasattr(rows[0], "accuracy"):
        return f"{rows[0].accuracy:.3f}"
    found, loss = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("found", "answer_loss"))
    return f"{found:.2f} ({loss:.2f})"


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left")
