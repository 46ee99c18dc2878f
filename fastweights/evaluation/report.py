"""The result file of an evaluation: measurements, model, settings and machine. And what an evaluation would measure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..environment import machine, versions
from ..files import write_json
from ..models.loading import empty_model, load_config, model_folder
from ..outputs import check_file, has_keys
from .evaluate import EvaluationSettings

__all__ = ["EvaluationReport", "is_evaluation", "plan_evaluation"]

FORMAT = 1


class EvaluationReport:
    """Collects results and saves after each one: an interruption costs only the current measurement.

    path: of the JSON file, whose folder is made; that of an earlier evaluation is replaced. None keeps the results in memory
        alone.
    model: the model measured; name: what the file calls it; text: where the text came from.

    Attributes:
        results: rows of every measure so far.

    Raises:
        ValueError: `path` is a folder, a link or a file that no evaluation wrote, or cannot be written to.
    """

    def __init__(self, path: Path | None, *, model: Any, name: str, settings: EvaluationSettings, text: str) -> None:
        self.path = path
        self.results: dict[str, list[Any]] = {}
        self._head: dict[str, Any] = {
            "format": FORMAT,
            "model": {
                "name": name,
                "parameters": model.num_parameters(),
                "state_size": {length: model.state_size(length) for length in settings.lengths},
                "dtype": str(model.dtype).removeprefix("torch."),
                "config": model.config.to_diff_dict(),
            },
            "settings": dataclasses.asdict(settings),
            "text": text,
            "versions": versions(),
            "machine": machine(str(model.device)),
        }
        if path is not None:
            _check_writable(path)

    def add(self, measure: str, rows: list[Any]) -> None:
        """Add rows of a measure, and save."""
        self.results.setdefault(measure, []).extend(rows)
        if measure == "lm-eval":
            self._head["versions"]["lm-eval"] = version("lm-eval")
        if self.path is not None:
            check_file("output", self.path, is_evaluation, "evaluation")  # somebody may have put one there
            write_json(self.path, self.document())

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {**self._head, "results": self._records()}

    def _records(self) -> dict[str, list[dict[str, Any]]]:
        return {
            measure: [{**dataclasses.asdict(row), **_derived(row)} for row in rows]
            for measure, rows in self.results.items()
        }


def is_evaluation(path: Path) -> bool:
    """Whether a file is the report of an evaluation, of this or an earlier version."""
    return has_keys(path, "format", "model", "settings", "results", "versions")


def plan_evaluation(
    model: Path,
    settings: EvaluationSettings,
    tasks: Sequence[str] = (),
    suites: Sequence[str] = (),
    *,
    text: str,
    output: Path,
) -> dict[str, Any]:
    """The model in a folder with its number of parameters, the settings and the file of the results. Weights are not read, and
    nothing is written.

    Args:
        tasks: of lm-evaluation-harness.
        suites: of such tasks.
        text: what a report calls the text.

    Raises:
        ValueError: no model of this library in the folder.
    """
    config = load_config(model_folder(model))
    parameters = empty_model(config).num_parameters()
    return {
        "model": str(model), "parameters": parameters, "settings": dataclasses.asdict(settings), "lm-eval": list(tasks),
        "suites": list(suites), "text": text, "output": str(output),
    }  # fmt: skip


def _check_writable(path: Path) -> None:
    """Makes the file's folder, and tries to write to it."""
    check_file("output", path, is_evaluation, "evaluation")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"output must be a file that can be written, but {path} cannot: {error.strerror}; choose another place"
        ) from None


def _derived(row: Any) -> dict[str, float | None]:
    """The perplexities, which are properties of a loss; None where they are too large for a number."""
    found = {name: getattr(row, name) for name in ("perplexity", "last_perplexity") if hasattr(row, name)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
