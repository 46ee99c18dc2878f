"""The measured part of docs/linearize.md: students of a teacher of 112M parameters, and the speed of their distillation.

`python -m fastweights_studies.pages.page_parts` writes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastweights_studies.measure.linearization import DISTILLED, FULL, LOSS, NOTHING, SPEED, TASK, TEACHER
from fastweights_studies.pages.rendering import describe_origins, number, table
from fastweights_studies.pages.results import read_measured
from fastweights_studies.record import Plain, Row, select

__all__ = ["measured"]

MISSING = "not measured"
NEVER = "not reached"
FILE = "linearization"
SHORT, LONG = min(FULL.asked.lengths), max(FULL.asked.lengths)
# Per column of the table: its head, the measure, how the model was trained, and the tokens of context.
COLUMNS = (
    ("loss, distilled", LOSS, DISTILLED, None),
    ("loss, from nothing", LOSS, NOTHING, None),
    ("KL", "kl_nats", DISTILLED, None),
    ("tokens", "tokens_until_near", DISTILLED, None),
    (f"recall at {SHORT:,}", "recall_exact", DISTILLED, SHORT),
    (f"recall at {LONG:,}", "recall_exact", DISTILLED, LONG),
    (f"recall at {SHORT:,}, from nothing", "recall_exact", NOTHING, SHORT),
    (f"needle at {SHORT:,}", "needle_nats", DISTILLED, SHORT),
    (f"needle at {LONG:,}", "needle_nats", DISTILLED, LONG),
)
ABOUT = """Nats per token, lower is better, and the accuracy of recall. *From nothing*: the same student with first weights,
trained with as many tokens as the distillation reads. *KL*: held-out divergence from the teacher. *Tokens*: read until the
held-out loss was within .05 nats of the teacher's. *Recall*: part of the questions for one of many numbers (`mk-niah-2`) where
each token of the right answer is the most likely one. *Needle*: nats per token of a number in sentences that repeat (`s-niah-1`).
*At*: tokens of text, question and answer. Several seeds: their mean and half of their range.
"""
UNMEASURED = """{}: **not measured yet**. The command above measures them; it needs a GPU.
"""


def measured(results: Path) -> str:
    """Both tables; a cell without rows says so, and so does the page where there are none at all."""
    rows, speeds = read_measured(FILE, TASK, results), read_measured(FILE, SPEED, results)
    parts = [losses(rows) if rows else UNMEASURED.format("Losses, recall and needles of these students")]
    parts.append(speed(speeds) if speeds else UNMEASURED.format("Speed and memory of the stages"))
    return "\n".join(parts)


def losses(rows: Iterable[Row]) -> str:
    rows, lines = list(rows), []
    teacher = [
        cell(select(rows, measure=measure, column={"trained": TEACHER, "length": length}))
        if trained == DISTILLED and measure not in ("kl_nats", "tokens_until_near")
        else ""
        for _, measure, trained, length in COLUMNS
    ]
    lines.append(["teacher", "all", *teacher])
    for memory, options in {**FULL.memories, **others(rows)}.items():
        for kept in FULL.kept:
            own = select(rows, mixer=memory, options=options, column={"kept": kept})
            cells = [
                cell(select(own, measure=measure, column={"trained": trained, "length": length}))
                for _, measure, trained, length in COLUMNS
            ]
            lines.append([f"`{memory}`", kept, *cells])
    head = ["memory", "attention kept", *(name for name, *_ in COLUMNS)]
    return "\n".join(
        [ABOUT, table(head, lines), describe_origins(rows, lambda row: (row.mixer, str(row.column), row.seed)), ""]
    )


def others(rows: Iterable[Row]) -> Mapping[str, Mapping[str, Plain]]:
    """Memories that have rows and are not of the plan."""
    return {
        str(row.mixer): row.options
        for row in rows
        if row.column["trained"] != TEACHER and row.mixer not in FULL.memories
    }


def cell(rows: Iterable[Row]) -> str:
    """The mean over seeds of one measure, and half of their range; of tokens, in millions."""
    rows = list(rows)
    values = [row.value for row in rows if row.value is not None]
    if not rows:
        return MISSING
    counts = rows[0].measure == "tokens_until_near"
    if len(values) < len(rows):
        return NEVER if counts else "diverged"
    shown = number(statistics.mean(values) / (1e6 if counts else 1)) + "M" * counts
    return shown + (f" ±{number((max(values) - min(values)) / 2, 2)}" if len(values) > 1 and not counts else "")


def speed(rows: Iterable[Row]) -> str:
    """Tokens per second and memory of the stages beside plain training of the same student."""
    rows, lines = list(rows), []
    for memory in FULL.timed:
        for stage, objective in (("(a)", "attention"), ("(b)", "logits")):
            cells = []
            for measure in ("tokens_per_second", "memory_bytes"):
                own, plain = (
                    next(
                        (row.value for row in select(rows, measure=measure, mixer=memory, column={"objective": what})),
                        None,
                    )
                    for what in (objective, "text")
                )
                cells.append(MISSING if own is None or plain is None else f"{own / plain:.2f}")
            lines.append([f"`{memory}`", stage, *cells])
    head = ["memory", "stage", "tokens per second / plain training", "memory / plain training"]
    return "\n".join([table(head, lines), describe_origins(rows, lambda row: (row.mixer, str(row.column))), ""])
