"""The result of one recall run, and its JSON file."""

import dataclasses
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..files import write_json
from ..kinds import checked
from .records import ResultsError, from_record, read_object

__all__ = ["RecallResult", "load_result", "save_result"]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallResult:
    """The result of one run.

    Attributes:
        run: the run's whole configuration, the fields of `fastweights.training.RecallRun`. "mixer" is a name, or a dict of
            name, options and label.
        status: "finished", or "diverged" when the loss was no longer finite, which ends the run.
        stopped_at: optimizer steps taken.
        accuracy: fraction of the test queries answered right at the end; None when the run diverged, or is measured by error.
        accuracy_steps: at which steps the model was measured; accuracies: the accuracy there.
        loss_steps, losses: training loss (nats per query, or the squared error); each point is the mean over the steps since the
            previous one.
        undertrained: whether the loss was still falling at the end, or its curve is too short to tell
            (`fastweights.results.undertrained`).
        parameters: number of trained parameters.
        state_size: numbers that the memory of one sequence holds after the whole sequence, over all layers.
        wall_seconds, cpu_seconds: time spent in training and testing, interruptions not counted.
        versions, machine: the libraries and the hardware of the run.
        chance: accuracy of guessing, as the task defines it; or the error of predicting 0.
        measure: what the task is measured by, "accuracy" or "error".
        error, errors: squared error of the predictions at the end, and at accuracy_steps, where that is the measure: the mean
            over held-out sequences, tokens and outputs.
        best_error: what the best predictor of the task has on the same sequences.
        by_token: columns of numbers, one per token: "token" and "accuracy", or "example", "error" and the errors of exact
            predictors, "ridge" and with a drift "kalman". Empty for tasks that have none.
        watched: what the installed watches found at the steps "step" of the training, by name. Empty unless the run asks for it
            (`watch_every`).
        validated: the measure on validation sequences at the steps "step", by the pairs of each stage. Empty without them; the
            choice of a learning rate is then by the tested ones.
        tested: the measure on the tested sequences at the end, by the pairs of each stage, for runs with validation sequences.
            `accuracy` or `error` is their mean.
        queries: how many test queries the accuracy is measured on; None for another measure, and in files from before it was
            recorded.
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
    measure: str = "accuracy"
    error: float | None = None
    errors: list[float] = dataclasses.field(default_factory=list)
    best_error: float | None = None
    by_token: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    queries: int | None = None
    watched: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    validated: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    tested: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """Of the task's measure at the end; None when the run diverged."""
        return self.error if self.measure == "error" else self.accuracy

    @property
    def counted_value(self) -> float:
        """`value` as means count it: a diverged run has no answer right, or predicts 0."""
        nothing = self.chance_level if self.measure == "error" else 0.0
        return nothing if self.value is None else self.value

    @property
    def chosen_by(self) -> float:
        """The value by which a learning rate is chosen: on validation sequences where there are some, no better than `stop_at`,
        at which a run ends; otherwise `counted_value`."""
        if self.diverged or not self.validated:
            return self.counted_value
        value, stop = (self.errors if self.measure == "error" else self.accuracies)[-1], self.run.get("stop_at")
        if stop is None:
            return value
        return max(value, stop) if self.measure == "error" else min(value, stop)

    def steps_to(self, level: float, pairs: int | None = None) -> int | None:
        """The first step at which the model was seen to be as good as `level`; None where it never was.

        pairs: of the stage of a mixture whose validation sequences count; their mean when None.
        """
        lower = self.measure == "error"
        values = (self.errors if lower else self.accuracies) if pairs is None else self.validated[str(pairs)]
        reached = (step for step, x in zip(self.accuracy_steps, values) if (x <= level if lower else x >= level))
        return next(reached, None)

    @property
    def chance_level(self) -> float:
        """`chance`; one of the values that a sequence shows where the file is from before there was `chance`."""
        return 1 / self.run["pairs"] if self.chance is None else self.chance

    @property
    def test_queries(self) -> int:
        """`queries`, or the number of test sequences, which is no more, where it is not known."""
        return self.run["test_examples"] if self.queries is None else self.queries

    @property
    def mixer(self) -> str:
        """The label of the run's mixer."""
        mixer = self.run["mixer"]
        return mixer if isinstance(mixer, str) else mixer["label"]

    @property
    def stage_values(self) -> list[float]:
        """The measure at the end of every stage of a curriculum that the run has ended, on that stage's task."""
        ends = accumulate(stage["steps"] for stage in self.run.get("curriculum", ()))
        values = dict(zip(self.accuracy_steps, self.errors if self.measure == "error" else self.accuracies))
        return [values[end] for end in ends if end in values]

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
    result = from_record(RecallResult, read_object(path), path)
    if result.run != run:
        raise ResultsError(f"result {path} belongs to another run; delete that file to repeat its run")
    return result
