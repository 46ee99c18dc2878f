"""Speed and memory, read from what the measuring scripts have found on a GPU: no number is measured twice."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from fastweights.layers import MIXERS
from fastweights.results.records import reading_fields

from ..record import Plain, Row, read_rows, select
from .cells import READ, format_number
from .part import Column, Part
from .request import Request
from .standing import Standing

__all__ = ["DecodingSpeed", "Memory", "ReadPart", "TrainingSpeed"]

STEP, DECODE = "training_step", "decode_table"  # the tasks of the rows
STEP_MS, ACTIVATIONS = "step_ms", "activations_bytes"  # and their measures
SPEED, STATE = "tokens_per_second", "state_bytes"
FILES = {STEP: "training-steps", DECODE: "decode-table"}
TRAINED_AS: dict[str, Plain] = {
    "layers": 24,
    "compiled": "blocks",
    "replayed": True,
}  # as `fastweights train` does on one GPU


@dataclass(frozen=True)
class Script:
    """A script that measures. seconds: of one GPU per mixer."""

    command: tuple[str, ...]
    seconds: int


TRAINING = Script(("python", "-m", "fastweights_studies.measure.training_steps", "--compile", "blocks", "--replay"), 20)
DECODING = Script(("python", "-m", "fastweights_studies.measure.decode_table"), 15)


@dataclass(frozen=True, kw_only=True)
class ReadPart(Part):
    """A part whose numbers scripts have measured on a GPU."""

    scripts: ClassVar[tuple[Script, ...]]

    @abstractmethod
    def _find(self, folder: Path) -> Iterator[Row]:
        """The rows of the part in a folder of results."""

    def setting(self, size: str) -> list[Column]:
        return []

    def run(self, request: Request) -> None:
        return None

    def rows(self, size: str, folder: Path, measurements: Path) -> list[Row]:
        """Raises:
        ResultsError: a file is damaged or of another version.
        """
        with reading_fields(f"of {self.name} in {measurements}"):
            return list(self._find(measurements))

    def label(self, row: Row) -> str:
        return str(row.mixer)

    def format(self, standing: Standing) -> str:
        return format_number(standing.mean)

    def how_to_read(self) -> str:
        return READ

    def cost(self, size: str) -> str:
        (script,) = self.scripts
        command = shlex.join([*script.command, "--mixers", "MIXER,..."])
        return f"read from the files of {command} (about {script.seconds} seconds of one GPU per mixer)"

    def how_to_measure(
        self, mixers: Sequence[str], rows: Sequence[Row], imports: Sequence[str], measurements: Path
    ) -> str:
        found = {row.mixer for row in rows}
        missing = [name for name in mixers if name in MIXERS and name not in found]
        if not missing:
            return ""
        # Absolute paths, because the scripts may run in another folder.
        modules = [str(Path(module).resolve()) if module.endswith(".py") else module for module in imports]
        options = [
            *(word for module in modules for word in ("--import", module)),
            "--results",
            str(measurements.resolve()),
        ]
        lines = [shlex.join([*script.command, "--mixers", ",".join(missing), *options]) for script in self.scripts]
        return "\n  ".join(["To measure what is missing, on a GPU:", *lines]) + "\n"


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed(ReadPart):
    """Tokens per second of a training step."""

    scripts = (TRAINING,)

    def _find(self, folder: Path) -> Iterator[Row]:
        yield from _find_steps(folder, STEP_MS)

    def title(self, row: Row) -> str:
        return _describe_batch(row)

    def number(self, row: Row) -> float | None:
        tokens = int(row.column["batch"]) * int(row.column["length"])  # type: ignore[arg-type]
        return None if row.value is None else tokens / row.value * 1e3


@dataclass(frozen=True, kw_only=True)
class DecodingSpeed(ReadPart):
    """Tokens per second of decoding."""

    scripts = (DECODING,)

    def _find(self, folder: Path) -> Iterator[Row]:
        yield from select(_read(folder, DECODE), measure=SPEED)

    def number(self, row: Row) -> float | None:
        return row.value

    def title(self, row: Row) -> str:
        batch = row.column["batch"]
        return f"{batch} sequence{'' if batch == 1 else 's'}"

    def detail(self, row: Row) -> str:
        return _describe_context(row.column["context"])


@dataclass(frozen=True, kw_only=True)
class Memory(ReadPart):
    """The state of a sequence, and the activations of a training step."""

    scripts = (TRAINING, DECODING)

    def _find(self, folder: Path) -> Iterator[Row]:
        table = _read(folder, DECODE)
        yield from select(table, measure=STATE, column={"batch": 1})
        growing = {row.mixer for row in table if row.column["context"] is not None}
        for row in _find_steps(folder, ACTIVATIONS):
            context = row.column["length"] if row.mixer in growing else None
            yield replace(row, column={**row.column, "context": context})

    def title(self, row: Row) -> str:
        return "state of a sequence, MB" if row.measure == STATE else f"activations of {_describe_batch(row)}, MB"

    def detail(self, row: Row) -> str:
        return _describe_context(row.column["context"])

    def number(self, row: Row) -> float | None:
        """In MB."""
        return None if row.value is None else row.value / 1e6

    def cost(self, size: str) -> str:
        return "read from the files of the two commands of training-speed and decoding-speed"


def _describe_batch(row: Row) -> str:
    return f"{row.column['batch']} sequences of {row.column['length']:,} tokens"


def _describe_context(context: Plain) -> str:
    """Of a mixer whose state grows with it."""
    return "" if context is None else f" at {context:,} tokens"


def _find_steps(folder: Path, measure: str) -> list[Row]:
    """The rows of a measure, of the newest training step of each mixer as `fastweights train` takes it on one GPU."""
    found = select(_read(folder, STEP), measure=measure, column=TRAINED_AS, options={})
    newest: dict[str | None, Row] = {}
    for row in found:
        own = row.column.get("library", "fastweights") == "fastweights" and row.mixer in MIXERS
        if own and (row.mixer not in newest or newest[row.mixer].origin.date < row.origin.date):
            newest[row.mixer] = row
    return list(newest.values())


def _read(folder: Path, task: str) -> list[Row]:
    """The rows of the files of a task. Each has the name of its file among what it depends on."""
    return [
        replace(row, run={**row.run, "file": path.name})
        for path in sorted(folder.glob(f"{FILES[task]}-*.json"))
        for row in read_rows(path)
    ]
