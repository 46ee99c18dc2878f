"""Tables of trainings and of evaluations of text models, for the terminal."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from ..checks import check_some
from ..kinds import checked
from ..results import (
    HarnessScore,
    LanguageResult,
    LengthPerplexity,
    RecallResult,
    RecallSummary,
    SuiteScores,
    summarize,
)
from ..results.experiment import best_results, describe_experiment
from .naming import find_task, short_unit
from .table_style import LENGTHS_PER_TABLE, add_row, plain_table

__all__ = [
    "evaluation_tables",
    "format_answers",
    "format_perplexity",
    "language_tables",
    "recall_table",
    "stage_table",
]


@checked
def recall_table(results: Sequence[RecallResult]) -> Table:
    """The best accuracy (or error) of each mixer, one section for each number of pairs, the best mixer first."""
    check_some("results", results, "result")
    rows, measure = summarize(results), results[0].measure
    table = plain_table(
        f"{measure.capitalize()}: {describe_experiment(results)}",
        f"{measure.capitalize()} at the best learning rate of the grid. {_explanation(results)} State size: numbers in memory "
        f"per sequence, all layers. {_marks(measure)}",
        text=("mixer",),
        numbers=(measure, "learning rate", "state size", "parameters"),
    )
    table.add_column("notes", overflow="fold")
    for pairs in sorted({row.pairs for row in rows}):
        table.add_section()
        own = sorted((row for row in rows if row.pairs == pairs), key=lambda row: row.rank)
        add_row(table, f"{pairs:,} {short_unit(results)}", _reference(own))
        for row in own:
            rate = "-" if row.learning_rate is None else f"{row.learning_rate:g}"
            add_row(
                table, row.mixer, _format_value(row), rate, f"{row.state_size:,}", f"{row.parameters:,}", _notes(row)
            )
    return table


@checked
def stage_table(results: Sequence[RecallResult]) -> Table:
    """The accuracy (or error) of each mixer at the end of every stage of a curriculum, on that stage's task."""
    check_some("results", results, "result")
    measure, unit = results[0].measure, short_unit(results)
    stages = [
        f"{stage['pairs']:,} {unit}" + ("" if stage["length"] is None else f", {stage['length']:,} tokens")
        for stage in results[0].run.get("curriculum", ())
    ]
    table = plain_table(
        f"{measure.capitalize()} by stage",
        f"At the end of each stage of the curriculum, at the best learning rate of the last stage, mean over the seeds that got "
        f"there. {measure.capitalize()} on the task of the stage.",
        text=("mixer",),
        numbers=stages,
    )
    for mixer in dict.fromkeys(result.mixer for result in results):
        best = best_results([result for result in results if result.mixer == mixer])
        columns = [[run.stage_values[n] for run in best if n < len(run.stage_values)] for n in range(len(stages))]
        add_row(table, mixer, *(f"{statistics.fmean(column):.3f}" if column else "-" for column in columns))
    return table


def language_tables(results: Sequence[LanguageResult]) -> Iterator[Table]:
    """Sizes and held-out loss of every model, then its perplexity by context length."""
    tokens = {result.tokens for result in results}
    differ = len(tokens) > 1 or any(result.label != result.name for result in results)  # as those of stages do
    table = plain_table(
        "Held-out text" if differ else f"Held-out text after {tokens.pop():,} tokens",
        "Loss: nats per token of packed documents, as in training; perplexity: e^loss. State size: numbers in memory per "
        "sequence.",
        text=("model",),
        numbers=(*(("steps", "tokens") if differ else ()), "parameters", "state size", "loss", "perplexity"),
    )
    for result in results:
        loss = result.held_out_loss
        add_row(
            table,
            result.label,
            *((f"{result.steps:,}", f"{result.tokens:,}") if differ else ()),
            f"{result.parameters:,}",
            f"{result.state_size:,}",
            f"{loss:.4f}",
            format_perplexity(loss),
        )
    yield table
    lengths = [entry["length"] for entry in results[0].perplexities]
    for start in range(0, len(lengths), LENGTHS_PER_TABLE):
        part = slice(start, start + LENGTHS_PER_TABLE)
        headers = [f"{length:,} tokens" for length in lengths[part]]
        table = plain_table("Perplexity of held-out texts by their length", text=("model",), numbers=headers)
        for result in results:
            add_row(table, result.label, *(format_perplexity(entry["loss"]) for entry in result.perplexities[part]))
        yield table


def evaluation_tables(results: Mapping[str, Sequence[Any]]) -> Iterator[Table]:
    """The tables of an evaluation's rows, by the names of the measures."""
    rest = dict(results)
    perplexity, harness, suites = (rest.pop(name, ()) for name in ("perplexity", "lm-eval", "suites"))
    if perplexity:
        yield _perplexity_table(perplexity)
    if rest:
        yield from _retrieval_tables(rest)
    if harness:
        yield _harness_table(harness)
    for source in dict.fromkeys(row.source for row in suites):
        yield _suite_table([row for row in suites if row.source == source])


def _perplexity_table(rows: Sequence[LengthPerplexity]) -> Table:
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


def _retrieval_tables(results: Mapping[str, Sequence[Any]]) -> Iterator[Table]:
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
            add_row(
                table, measure, *(_format_cell([row for row in rows if row.length == length]) for length in lengths)
            )
        yield table


def _harness_table(scores: Sequence[HarnessScore]) -> Table:
    """One row per task and metric of lm-evaluation-harness."""
    cuts = [
        f"{score.task}: {score.cut_prompts:,} prompts by {score.cut_tokens:,} tokens in all"
        for score in scores
        if score.cut_prompts
    ]
    table = plain_table(
        "lm-evaluation-harness",
        f"Cut at the beginning: {'; '.join(dict.fromkeys(cuts))}." if cuts else "No prompt was cut.",
        text=("task", "metric"),
        numbers=("value",),
    )
    for score in scores:
        add_row(table, score.task, score.metric, f"{score.value:.4f}")
    return table


def _suite_table(rows: Sequence[SuiteScores]) -> Table:
    """One row per number, one column per model: the one that was measured, and those of a paper with its table's columns."""
    first, *printed = rows
    note = f" Papers' models: {printed[0].size}." if printed else ""
    table = plain_table(
        f"Suite {first.source}" if not printed else f"As in {first.source}",
        f"Accuracies in percent. The average leaves perplexities out; - was not measured or not printed.{note}",
        text=("task/metric",),
        numbers=[row.model for row in rows],
    )
    for column in first.values:
        add_row(table, column, *(_format_number(row.values[column]) for row in rows))
    table.add_section()
    add_row(table, "average", *(_format_number(row.average) for row in rows))
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700.0)):.4g}"


def _explanation(results: Sequence[RecallResult]) -> str:
    if results[0].measure == "accuracy":
        return f"Chance: {find_task(results).guess}."
    return "Squared error, the mean over all examples. Best: ridge regression or, with a drift, the Kalman filter."


def _marks(measure: str) -> str:
    undertrained = "Undertrained: the loss was still falling at the end, or the run is too short to tell."
    if measure == "error":
        return f"{undertrained} At chance: no better than predicting 0."
    return (
        f"{undertrained} At chance: within the noise of the test. Below chance: worse than guessing, which points to a fault or "
        "to a training that has hardly begun."
    )


def _reference(rows: Sequence[RecallSummary]) -> str:
    """What the rows of one difficulty are to be compared with."""
    if rows[0].measure == "accuracy":
        return f"chance {rows[0].chance:.3f}"
    bests = [row.best_error for row in rows if row.best_error is not None]
    return f"best {min(bests):.3f}" if bests else "-"


def _format_value(row: RecallSummary) -> str:
    if row.value is None:
        return "-"
    spread = "" if row.value_std is None else f" ± {row.value_std:.3f}"
    return f"{row.value:.3f}{spread}"


def _notes(row: RecallSummary) -> str:
    notes = ["undertrained"] if row.undertrained else []
    if row.standing in ("at chance", "below chance"):
        notes.append(row.standing)
    if row.diverged:
        notes.append(f"{row.diverged} of {row.runs} runs diverged")
    return ", ".join(notes)


def _format_cell(rows: Sequence[Any]) -> str:
    if not rows:
        return "-"
    if hasattr(rows[0], "accuracy"):
        return f"{rows[0].accuracy:.3f}"
    return format_answers(rows)


def format_answers(rows: Sequence[Any]) -> str:
    """Of rows of needles or RULER tasks: the part found, and in brackets the loss of the answers."""
    found, loss = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("found", "answer_loss"))
    return f"{found:.2f} ({loss:.2f})"
