"""Speed and memory, read from what benchmarks/ has measured on a GPU: no number is measured twice."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastweights.layers import MIXERS
from fastweights.results.records import reading_fields

from ..record import Plain, Row, select
from ..record import read_rows as read_file

__all__ = ["commands", "cost_of_reading", "mixer_of", "read_rows"]

LAYERS, REPLAYED = "24 layers of ", ", compiled by blocks, replayed"
# What measures a part, and seconds of one GPU per mixer.
BENCHMARKS = {
    "training-speed": (
        ("studies/src/fastweights_studies/measure/training_steps.py", "--compile", "blocks", "--replay"),
        20,
    ),
    "decoding-speed": (("studies/src/fastweights_studies/measure/decode_table.py",), 15),
}
MEASURED_BY = {"training-speed": ["training-speed"], "decoding-speed": ["decoding-speed"], "memory": [*BENCHMARKS]}


def commands(part: str, mixers: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command lines that measure these mixers for a part, in a checkout of the repository and on a GPU."""
    return [
        shlex.join(["python", *BENCHMARKS[one][0], "--mixers", ",".join(mixers), *options]) for one in MEASURED_BY[part]
    ]


def cost_of_reading(part: str) -> str:
    """The command that measures a part, and how long it takes."""
    if part not in BENCHMARKS:
        return f"the two commands of {' and '.join(MEASURED_BY[part])}"
    (command,) = commands(part, ["MIXER", "..."])
    return f"{command} (about {BENCHMARKS[part][1]} seconds of one GPU per mixer)"


def read_rows(part: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a part: column, mixer, values (one, the median over repeated steps) and where it was measured.

    Raises:
        ResultsError: a file is damaged or of another version.
    """
    files = {"training-speed": [_training], "decoding-speed": [_decoding], "memory": [_state, _activations]}
    with reading_fields(f"of {part} in {folder}"):
        return [row for read in files[part] for row in read(folder)]


def _training(folder: Path) -> Iterator[dict[str, Any]]:
    for path, row in _steps(folder, "step_ms"):
        batch, length = _batch(row)
        column = f"{batch} sequences of {length:,} tokens"
        yield _row(column, row.mixer, batch * length / _value(row) * 1e3, path, row)


def _activations(folder: Path) -> Iterator[dict[str, Any]]:
    growing = {row.mixer for _, row in _table(folder, "state_bytes") if row.column["context"] is not None}
    for path, row in _steps(folder, "activations_bytes"):
        batch, length = _batch(row)
        column = f"activations of {batch} sequences of {length:,} tokens, MB"
        yield _row(column, _label(row.mixer, length if row.mixer in growing else None), _value(row) / 1e6, path, row)


def _steps(folder: Path, measure: str) -> Iterator[tuple[Path, Row]]:
    """A measure of every step of 24 layers that is compiled by blocks and replayed as a CUDA graph, as `fastweights train` does
    on one GPU, with its file; of several the newest."""
    newest: dict[str | None, tuple[Path, Row]] = {}
    column: dict[str, Plain] = {
        "layers": 24,
        "width": 1024,
        "compiled": "blocks",
        "replayed": True,
        "library": "fastweights",
    }
    for path in sorted(folder.glob("training-steps-*.json")):
        for row in select(read_file(path), task="training_step", measure=measure, options={}, column=column):
            if row.mixer not in MIXERS:
                continue
            if row.mixer not in newest or newest[row.mixer][1].origin.date < row.origin.date:
                newest[row.mixer] = path, row
    yield from newest.values()


def _decoding(folder: Path) -> Iterator[dict[str, Any]]:
    for path, row in _table(folder, "tokens_per_second"):
        batch = _number(row, "batch")
        column = f"{batch} sequence{'s' if batch > 1 else ''}"
        yield _row(column, _label(row.mixer, _context(row)), _value(row), path, row)


def _state(folder: Path) -> Iterator[dict[str, Any]]:
    for path, row in _table(folder, "state_bytes"):
        if row.column["batch"] == 1:
            label = _label(row.mixer, _context(row))
            yield _row("state of a sequence, MB", label, _value(row) / 1e6, path, row)


def _table(folder: Path, measure: str) -> Iterator[tuple[Path, Row]]:
    for path in sorted(folder.glob("decode-table-*.json")):
        for row in select(read_file(path), task="decode_table", measure=measure):
            yield path, row


AT = " at "


def _number(row: Row, name: str) -> int:
    return int(row.column[name])  # type: ignore[arg-type]


def _batch(row: Row) -> tuple[int, int]:
    return _number(row, "batch"), _number(row, "length")


def _context(row: Row) -> int | None:
    return None if row.column["context"] is None else _number(row, "context")


def _value(row: Row) -> float:
    if row.value is None:
        raise ValueError(f"a row of {row.mixer} in {row.task} has no number")
    return row.value


def _label(mixer: str | None, context: int | None) -> str:
    """The mixer; with the context where its state grows with it."""
    return str(mixer) if context is None else f"{mixer}{AT}{context:,} tokens"


def mixer_of(label: str) -> str:
    """The mixer of a label."""
    return label.partition(AT)[0]


def _row(column: str, mixer: str | None, value: float, path: Path, row: Row) -> dict[str, Any]:
    measured = {
        "time": row.origin.date, "machine": row.origin.device, "torch": row.origin.versions["torch"], "file": path.name,
        "commit": row.origin.commit[:7] + " with uncommitted changes" * row.origin.changed,
    }  # fmt: skip
    return {"column": column, "mixer": mixer, "values": [value], "measured": measured}
