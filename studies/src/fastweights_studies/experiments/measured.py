"""Reads what the benchmarks have measured, for claims about speed: no number is measured twice."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from fastweights.results.records import read_object

from .claim import Unmeasured

__all__ = ["device_ms", "origin", "read_results", "steps"]


def read_results(folder: Path, name: str, command: str) -> dict[str, Any]:
    """The result file `name`, which `command` writes."""
    path = folder / name
    if not path.exists():
        raise Unmeasured(f"needs {path}, which `{command}` measures on that GPU; --measurements names another folder")
    return read_object(path)


def origin(name: str, content: dict[str, Any], measured: dict[str, Any] | None = None) -> str:
    """The file, the machine, the date and the commit of a part that may be from an earlier run than the rest."""
    when = {**content, **(measured or {})}
    return (
        f"{name}: {content['device']}, torch {when['torch']}, {when['time'][:10]}, commit {when['commit'][:7]}"
        + " with uncommitted changes" * ("uncommitted" in when["commit"])
    )


def device_ms(row: dict[str, Any], stage: str, who: str = "ours") -> float:
    """Median device time of a row of kernels-*.json."""
    return float(row[stage]["graph"][who][0])


def steps(model: dict[str, Any]) -> float:
    """Median milliseconds of a training step or of a decoding step."""
    times = model["step, ms"] if "step, ms" in model else model["ms"]
    return statistics.median(times)
