"""results.json: a whole experiment in one file, its configuration, its summary and every run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._files import write_json
from .results import RecallResult, ResultsError, read_object, result_from_record
from .summary import summarize

__all__ = ["load_results", "save_results"]

FORMAT = 1


def save_results(path: Path, *, experiment: dict[str, Any], results: Sequence[RecallResult]) -> None:
    """Write the experiment's configuration, the summary (see `RecallSummary`) and all runs (see `RecallResult`)."""
    write_json(
        path,
        {
            "format": FORMAT,
            "experiment": experiment,
            "summary": [dataclasses.asdict(row) for row in summarize(results)],
            "runs": [dataclasses.asdict(result) for result in results],
        },
    )


def load_results(path: Path) -> list[RecallResult]:
    """All runs of a results.json.

    Raises:
        ResultsError: the file is damaged or has another format.
    """
    record = read_object(path)
    if record.get("format") != FORMAT or not isinstance(record.get("runs"), list):
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    return [result_from_record(run, path) for run in record["runs"]]
