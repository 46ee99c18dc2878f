"""How long trainings take on a GPU, from steps that `python -m fastweights_studies.measure.recall_steps` has measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..record import Row, read_rows, select

__all__ = ["predict_minutes", "read_steps"]


def read_steps(results: Path) -> list[Row]:
    """The rows of replayed steps of all files, the newest measurement first."""
    rows = [row for path in results.glob("recall-steps-*.json") for row in read_rows(path)]
    found = select(rows, task="recall_step", measure="step_ms", column={"replayed": True})
    return sorted(found, key=lambda row: row.origin.date, reverse=True)


def predict_minutes(steps: Mapping[str, int], rows: Iterable[Row], workers: int) -> dict[str, object]:
    """Minutes of one GPU for so many steps of each mixer, which is an upper bound where trainings end before their last step.

    A mixer whose step was not measured counts as the median of those that were. Processes that share the GPU count as one after
    the other, unless their steps together were measured.

    Args:
        steps: by label. rows: of `read_steps`. workers: processes that share the GPU.
    """
    rows = list(rows)
    alone = {name: _fastest(rows, name, 1) for name in dict.fromkeys(str(row.mixer) for row in rows)}
    known = {name: ms for name, ms in alone.items() if ms is not None}
    if not known:
        return {"GPU minutes": "unknown, no steps were measured"}
    usual = statistics.median(known.values())
    gains = [workers * ms / together for name, ms in known.items() if (together := _fastest(rows, name, workers))]
    gain = statistics.fmean(gains) if gains and workers > 1 else 1.0
    names = {label: label.partition(":")[0] for label in steps}
    milliseconds = sum(count * known.get(names[label], usual) for label, count in steps.items())
    return {
        "GPU minutes, at most": round(milliseconds / gain / 60_000),
        "steps measured of mixers": f"{sum(name in known for name in names.values())} of {len(steps)}",
        "processes": f"{workers}, {gain:.1f} times as fast as one" if gains or workers == 1 else f"{workers}, counted as one",
    }  # fmt: skip


def _fastest(rows: Iterable[Row], mixer: str, processes: int) -> float | None:
    """Milliseconds of a step of a mixer in the newest measurement with so many processes, None where there is none. The recall of
    the leaderboard stands before other settings."""
    own = [
        row
        for row in rows
        if row.mixer == mixer and row.column.get("processes", 1) == processes and row.value is not None
    ]
    own = [row for row in own if row.column["setting"] == "recall"] or own
    return min((row.value for row in own if row.origin == own[0].origin and row.value is not None), default=None)
