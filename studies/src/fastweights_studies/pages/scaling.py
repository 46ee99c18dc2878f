"""The measured parts of docs/train.md: trainings on several GPUs, and of rows that are divided over them.

`python -m fastweights_studies.pages.page_parts` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fastweights_studies.measure.scaling import WAYS, one_gpu_beside, share_of_one_gpu
from fastweights_studies.pages.rendering import describe_origins, share, table
from fastweights_studies.pages.results import read_measured, value_of
from fastweights_studies.record import Row, select

__all__ = ["context_parallel", "data_parallel"]

LAST = ("GiB per GPU", "predicted", "measured")  # columns of both tables
SHOWN = {
    "DDP": "DDP",
    "DDP-bf16": "DDP, gradients added up in bfloat16",
    "DDP-launched": "DDP, launched by the host",
    "FSDP2": "FSDP2",
    "FSDP2-launched": "FSDP2, launched by the host",
    "FSDP2-kept": "FSDP2, kept for the backward",
    "FSDP2-prefetch": "FSDP2, gathered ahead",
    "FSDP2-kept-prefetch": "FSDP2, kept and gathered ahead",
    "context-heads": "heads exchanged",
    "context-state": "states passed on",
    "context-checkpointed": "the way that fits, FSDP2, `gradient_checkpointing`",
}


def data_parallel(results: Path) -> str:
    """Each GPU has rows of its own: steps, and tokens per second beside one GPU."""
    rows = [row for row in _read(results) if not _is_divided(row)]
    lines = [
        [_device(row), _model(row), _way(row), f"{row.value:.0f}", _alone(rows, row), _share(rows, row), *_last_cells(rows, row)]
        for row in select(rows, measure="step_ms") if row.column["way"]
    ]  # fmt: skip
    head = [
        "GPUs", "model", "way", "step, ms", "one GPU alone, ms", "tokens per second of each GPU / of one alone", *LAST,
    ]  # fmt: skip
    return f"{table(head, sorted(lines))}\n{_newest(rows)}\n"


def context_parallel(results: Path) -> str:
    """All GPUs have parts of one row."""
    every = _read(results)
    rows = [row for row in every if _is_divided(row)]
    lines = [
        [
            _device(row), _model(row), f"{_count(row, 'gpus') * _count(row, 'length'):,}", _way(row), f"{row.value:,.0f}",
            _share(every, row), *_last_cells(rows, row),
        ]
        for row in select(rows, measure="step_ms")
    ]  # fmt: skip
    head = [
        "GPUs", "model", "tokens of the row", "way", "step, ms",
        "tokens per second of each GPU / of one alone with its part", *LAST,
    ]  # fmt: skip
    return f"{table(head, sorted(lines))}\n{_newest(rows)}\n"


def _read(results: Path) -> list[Row]:
    return [row for row in read_measured("scaling", "scaling", results) if row.value is not None]


def _is_divided(row: Row) -> bool:
    return "context_way" in WAYS.get(str(row.column["way"]), {})


def _newest(rows: Sequence[Row]) -> str:
    """Commit and versions of the newest run."""

    def run(row: Row) -> tuple[str, ...]:
        return row.origin.date[:10], row.origin.commit, row.origin.versions["files"]

    newest = run(max(rows, key=lambda row: row.origin.date))
    return describe_origins([row for row in rows if run(row) == newest], lambda row: None)


def _count(row: Row, name: str) -> int:
    return int(row.column[name])  # type: ignore[arg-type]


def _device(row: Row) -> str:
    return f"{row.column['gpus']} {row.origin.device.split()[1]}"


def _model(row: Row) -> str:
    return f"`{row.column['preset']}`" + (f" with `{row.mixer}`" if row.mixer else "")


def _way(row: Row) -> str:
    return SHOWN[str(row.column["way"])]


def _same(rows: Iterable[Row], row: Row) -> list[Row]:
    """Those of the same device and mixer."""
    return [one for one in rows if (one.origin.device, one.mixer) == (row.origin.device, row.mixer)]


def _alone(rows: Iterable[Row], row: Row) -> str:
    alone = one_gpu_beside(_same(rows, row), row)
    return "" if alone is None else f"{alone.value:.0f}"


def _share(rows: Iterable[Row], row: Row) -> str:
    value = share_of_one_gpu(_same(rows, row), row.column, row.mixer)
    return "" if value is None else share(value)


def _last_cells(rows: Iterable[Row], row: Row) -> list[str]:
    """The cells under `LAST`."""
    sizes = (
        value_of(_same(rows, row), measure, column=row.column) for measure in ("memory_bytes", "predicted_memory_bytes")
    )
    return [*("" if size is None else f"{size / 2**30:.1f}" for size in sizes), row.origin.date[:10]]
