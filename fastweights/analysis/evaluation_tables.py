"""Tables of an evaluation of a text model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from ..results import HarnessScore, LengthPerplexity
from .table_style import LENGTHS_PER_TABLE, add_row, plain_table

__all__ = ["evaluation_tables", "harness_table", "perplexity_table", "retrieval_tables"]


def evaluation_tables(results: Mapping[str, Sequence[Any]]) -> Iterator[Table]:
    """The tables of an evaluation's rows, by the names of the measures."""
    rest = dict(results)
    perplexity, harness = rest.pop("perplexity", ()), rest.pop("lm-eval", ())
    if perplexity:
        yield perplexity_table(perplexity)
    if rest:
        yield from retrieval_tables(rest)
    if harness:
        yield harness_table(harness)


def perplexity_table(rows: Sequence[LengthPerplexity]) -> Table:
    """One row per context length."""
    first = rows[0]
    joined = f", {first.joined} of them joined from shorter documents" if first.joined else ""
    table = plain_table(
        f"Perplexity by context length, {first.texts} text{'' if first.texts == 1 else 's'}{joined}",
        "Perplexity: of all tokens up to the length. Last tokens: of the last stretch before it alone.",
        numbers=("tokens of context", "perplexity", "perplexity of last tokens", "loss in nats per token"),
    )
    for row in rows:
        add_row(table, f"{row.length:,}", f"{row.perplexity:,.2f}", f"{row.last_perplexity:,.2f}", f"{row.loss:.4f}")
    return table


def retrieval_tables(results: Mapping[str, Sequence[Any]]) -> Iterator[Table]:
    """Recall, needle and RULER tasks: one row per task, one column per length, a few lengths per table.

    results: `WordRecall`, `NeedleRecall` or `RulerRecall` rows by the name of the measure.
    """
    every = sorted({row.length for rows in results.values() for row in rows})
    for start in range(0, len(every), LENGTHS_PER_TABLE):
        lengths = every[start : start + LENGTHS_PER_TABLE]
        table = plain_table(
            "Recall and retrieval by context length",
            "Recall tasks: part of the queries answered right. RULER tasks: part of the answers found, of needles over all "
            "depths, and in brackets the loss of the right answer in nats per token.",
            text=("task",),
            numbers=[f"{length:,} tokens" for length in lengths],
        )
        for measure, rows in results.items():
            add_row(table, measure, *(_cell([row for row in rows if row.length == length]) for length in lengths))
        yield table


def harness_table(scores: Sequence[HarnessScore]) -> Table:
    """One row per task and metric of lm-evaluation-harness."""
    table = plain_table("lm-evaluation-harness", text=("task", "metric"), numbers=("value",))
    for score in scores:
        add_row(table, score.task, score.metric, f"{score.value:.4f}")
    return table


def _cell(rows: Sequence[Any]) -> str:
    if not rows:
        return "-"
    if hasattr(rows[0], "accuracy"):
        return f"{rows[0].accuracy:.3f}"
    found, loss = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("found", "answer_loss"))
    return f"{found:.2f} ({loss:.2f})"
