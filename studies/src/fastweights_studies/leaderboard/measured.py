"""Speed and memory, read from what benchmarks/ has measured on a GPU: no number is measured twice."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastweights.layers import MIXERS
from fastweights.results.records import read_object, reading_fields

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
    for where, name, comparison, model in _steps(folder):
        tokens = comparison["batch"] * comparison["length"]
        column = f"{comparison['batch']} sequences of {comparison['length']:,} tokens"
        yield _row(column, name, tokens / model["step, ms"][0] * 1e3, where)


def _activations(folder: Path) -> Iterator[dict[str, Any]]:
    growing = {row["mixer"] for _, row in _table(folder) if row["context"] is not None}
    for where, name, comparison, model in _steps(folder):
        column = f"activations of {comparison['batch']} sequences of {comparison['length']:,} tokens, MB"
        label = _label({"mixer": name, "context": comparison["length"] if name in growing else None})
        yield _row(column, label, model["activations, GiB"] * 2**30 / 1e6, where)


def _steps(folder: Path) -> Iterator[tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]]:
    """The machine, the mixer, the comparison and the model of every step of 24 layers that is compiled by blocks and replayed as
    a CUDA graph, as `fastweights train` does on one GPU; of several the newest."""
    newest: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {}
    for path in sorted(folder.glob("training-steps-*.json")):
        content = read_object(path)
        for comparison in content["comparisons"].values():
            where = {**content, **comparison.get("measured", {}), "file": path.name}
            for name, model in comparison["models"].items():
                mixer = name.removeprefix(LAYERS).removesuffix(REPLAYED)
                if name != LAYERS + mixer + REPLAYED or mixer not in MIXERS:
                    continue
                if mixer not in newest or newest[mixer][0]["time"] < where["time"]:
                    newest[mixer] = (where, mixer, comparison, model)
    yield from newest.values()


def _decoding(folder: Path) -> Iterator[dict[str, Any]]:
    for where, row in _table(folder):
        if "tokens/s" in row:
            column = f"{row['batch']} sequence{'s' if row['batch'] > 1 else ''}"
            yield _row(column, _label(row), row["tokens/s"], where)


def _state(folder: Path) -> Iterator[dict[str, Any]]:
    for where, row in _table(folder):
        if row["batch"] == 1 and "tokens/s" in row:
            yield _row("state of a sequence, MB", _label(row), row["state, bytes per sequence"] / 1e6, where)


def _table(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for path in sorted(folder.glob("decode-table-*.json")):
        content = read_object(path)
        for row in content["rows"].values():
            yield {**content, **row.get("measured", {}), "file": path.name}, row


AT = " at "


def _label(row: dict[str, Any]) -> str:
    """The mixer; with the context where its state grows with it."""
    return row["mixer"] if row["context"] is None else f"{row['mixer']}{AT}{row['context']:,} tokens"


def mixer_of(label: str) -> str:
    """The mixer of a label."""
    return label.partition(AT)[0]


def _row(column: str, mixer: str, value: float, where: dict[str, Any]) -> dict[str, Any]:
    measured = {
        "time": where["time"], "machine": where["device"], "torch": where["torch"], "file": where["file"],
        "commit": where["commit"][:7] + " with uncommitted changes" * ("uncommitted" in where["commit"]),
    }  # fmt: skip
    return {"column": column, "mixer": mixer, "values": [value], "measured": measured}
