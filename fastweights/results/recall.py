"""The result of one recall run, and its JSON file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..files import write_json

__all__ = ["RecallResult", "ResultsError", "load_result", "read_object", "result_from_record", "save_result"]


class ResultsError(ValueError):
    """A results file cannot be used: damaged, of another version, or of another run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallResult:
    """The result of one run.

    Attributes:
        run: the run's whole configuration, the fields of `fastweights.training.RecallRun`. "mixer" is a name, or a dict of
            name, options and label.
        status: "finished", or "diverged" when the loss was no longer finite, which ends the run.
        stopped_at: optimizer steps taken.
        accuracy: fraction of the test queries answered right at the end; None when the run diverged.
        accuracy_steps, accuracies: the accuracy during training, and at which steps.
        loss_steps, losses: training loss in nats per query, each the mean over the steps since the previous point.
        undertrained: whether the loss was still falling at the end (`fastweights.analysis.still_falling`).
        parameters: number of trained parameters.
        state_size: numbers that the memory of one sequence holds after the whole sequence, over all layers.
        wall_seconds, cpu_seconds: time spent in training and testing, interruptions not counted.
        versions, machine: the libraries and the hardware of the run.
        chance: accuracy of guessing, as the task defines it.
    """

    run: dict[str, Any]
    status: str
    stopped_at: int
    accuracy: float | None
    accuracy_steps: list[int]
    accuracies: list[float]
    loss_steps: list[int]
    losses: list[float]
    undertrained: bool
    parameters: int
    state_size: int
    wall_seconds: float
    cpu_seconds: float
    versions: dict[str, str]
    machine: dict[str, Any]
    chance: float | None = None

    @property
    def chance_level(self) -> float:
        """`chance`; one of the values that a sequence shows where the file is from before there was `chance`."""
        return 1 / self.run["pairs"] if self.chance is None else self.chance

    @property
    def mixer(self) -> str:
        """The label of the run's mixer."""
        mixer = self.run["mixer"]
        return mixer if isinstance(mixer, str) else mixer["label"]

    @property
    def diverged(self) -> bool:
        """Whether the run was stopped because its loss was not finite."""
        return self.status == "diverged"


def save_result(path: Path, result: RecallResult) -> None:
    """Write one run's result, atomically."""
    write_json(path, dataclasses.asdict(result))


def load_result(path: Path, *, run: dict[str, Any]) -> RecallResult:
    """Read one run's result.

    Raises:
        ResultsError: the file is damaged or is not the result of `run`.
    """
    result = result_from_record(read_object(path), path)
    if result.run != run:
        raise ResultsError(f"result {path} belongs to another run; delete that file to repeat its run")
    return result


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ResultsError if there is none."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:  # JSON or UTF-8
        raise ResultsError(f"result {path} is damaged ({error}); delete that file to have it made again") from None
    if not isinstance(record, dict):
        raise ResultsError(f"result {path} is damaged (no JSON object); delete that file to have it made again")
    return record


def result_from_record(record: dict[str, Any], path: Path) -> RecallResult:
    """The result that a JSON object of file `path` describes; ResultsError if its fields are others."""
    try:
        return RecallResult(**record)
    except TypeError as error:
        raise ResultsError(
            f"result {path} has other fields ({error}); delete that file to have it made again"
        ) from None
