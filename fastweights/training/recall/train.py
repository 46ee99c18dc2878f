"""Trains one recall run: from its checkpoint, if there is one, to its result."""

import bisect
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checks import check_number, check_path, describe_value
from ...data import RecallTask
from ...environment import machine, versions
from ...kinds import checked
from ...results import RecallResult, undertrained
from ..checkpoints import load_checkpoint, save_checkpoint
from ..first_weights import draw_by_name
from ..optimization import learning_rate_factor
from .batches import training_batches
from .experiment import RecallRun
from .objectives import Measured, Objective, make_objective
from .step import TrainingStep
from .watching import find_watches, watch_model

__all__ = ["Training", "train_run"]

_CURVE_POINTS = 100
_VALIDATION = 2**40  # added to the seed of the tested sequences


@checked
def train_run(
    run: RecallRun,
    checkpoint: Path,
    *,
    checkpoint_seconds: float = 10.0,
    on_step: Callable[[int, float | None], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    model_folder: Path | None = None,
) -> RecallResult | None:
    """Train and test the model of `run`.

    The numbers depend on `run` alone, not on where or how often training was interrupted: a batch is a pure function of its
    index, and the checkpoint holds the parameters, the optimizer's state and the random state. (They may
    differ between numbers of threads: `run_recall` sets `torch.set_num_threads(1)` in its workers.)

    Args:
        run: what to train.
        checkpoint: file that the run is saved to, and continued from if it exists.
        checkpoint_seconds: time between two saves; 0 saves after every step.
        on_step: called after every step with the number of steps taken and the latest point of the loss curve.
        should_stop: called before every step; when it returns True, the run is saved and None is returned.
        model_folder: where a run with `save_models` leaves its model, for `FastWeightsForCausalLM.from_pretrained`.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another run.
        ValueError: the run is to be watched, and nothing is installed that looks.
    """
    if not isinstance(run, RecallRun):
        raise TypeError(f"run must be a RecallRun, got {describe_value(run)}")
    checkpoint = check_path("checkpoint", checkpoint, "the path of a file")
    check_number("checkpoint_seconds", checkpoint_seconds, low=0)
    training = Training(run)
    config = run.record()
    if checkpoint.exists():
        training.restore(load_checkpoint(checkpoint, run=config))
    history = training.history
    saved = time.monotonic()
    for batch in training_batches(run, history.step):
        stop = should_stop is not None and should_stop()
        if stop or (history.step and time.monotonic() - saved >= checkpoint_seconds):
            save_checkpoint(checkpoint, run=config, state=training.state())
            saved = time.monotonic()
        if stop:
            return None
        training.step(batch)
        if on_step is not None:
            on_step(history.step, history.losses[-1] if history.losses else None)
        if history.diverged or history.stopped:
            break
    if run.save_models and model_folder is not None:
        training.model.save_pretrained(model_folder)
    return training.result()


@dataclasses.dataclass
class _History:
    """The record of a run so far. Plain values, because the checkpoint contains it."""

    step: int = 0
    diverged: bool = False
    stopped: bool = False
    loss_steps: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracy_steps: list[int] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    errors: list[float] = dataclasses.field(default_factory=list)
    queries: int | None = None
    best_error: float | None = None
    by_token: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    watched: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    validated: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    tested: dict[str, float] = dataclasses.field(default_factory=dict)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Training:
    """The state of a run: model, optimizer step and history.

    Args:
        uses_graphs: see `TrainingStep`.
        change: called with the new model, before the optimizer takes its parameters.
    """

    def __init__(self, run: RecallRun, uses_graphs: bool = True, change: Callable[[Any], None] | None = None) -> None:
        if run.watch_every:
            find_watches()
        self.run = run
        self.task = run.make_task()
        torch.manual_seed(run.seed)
        self.ends = list(itertools.accumulate(stage.steps for stage in run.curriculum)) or [run.steps]
        self.objectives = [make_objective(task) for _, task in run.stages()]
        self.model = self.objectives[-1].build(run.model_config()).train()
        if run.seed_by_name:
            draw_by_name(self.model, run.seed)
        if change is not None:
            change(self.model)
        self.model.to(run.device)
        self.take = TrainingStep(
            self.model, betas=(run.beta1, run.beta2), weight_decay=run.weight_decay,
            max_gradient_norm=run.max_gradient_norm, uses_graphs=uses_graphs,
        )  # fmt: skip
        self.history = _History()
        self._window_loss = torch.zeros((), dtype=torch.float64, device=run.device)  # sum since the last curve point
        self._clock = time.perf_counter(), time.process_time()

    def step(self, batch: Any) -> None:
        """One optimizer step; records the loss, and the measurement where it is due."""
        run, history = self.run, self.history
        objective = self.objectives[run.stage_at(history.step)]
        self._window_loss += self.take(objective, batch, self._learning_rate(history.step))
        history.step += 1
        if history.step % math.ceil(run.steps / _CURVE_POINTS) == 0 or history.step == run.steps:
            self._record_loss()
        if not history.diverged and history.step in self._evaluation_steps():
            if run.validation_examples is None:
                self._record(
                    objective.measure(self.model, seed=run.seed, examples=run.test_examples, device=run.device)
                )
            else:
                self._validate(run.validation_examples, [objective] if run.curriculum else self.objectives)
        if run.watch_every and not history.diverged and history.step % run.watch_every == 0:
            task = run.stages()[bisect.bisect_left(self.ends, history.step)][1]
            assert isinstance(task, RecallTask)  # the settings refuse others
            found = watch_model(self.model, task, seed=run.seed, device=run.device)
            for name, value in {"step": float(history.step), **found}.items():
                history.watched.setdefault(name, []).append(value)

    def _validate(self, examples: int, objectives: Sequence[Objective]) -> None:
        """Measure on validation sequences of every stage, and at the end of the run once on the tested ones."""
        run, history = self.run, self.history

        def measure_all(seed: int, examples: int) -> list[Measured]:
            return [one.measure(self.model, seed=seed, examples=examples, device=run.device) for one in objectives]

        found = measure_all(run.seed + _VALIDATION, examples)
        names = [str(stage.pairs) for stage in run.mixture] or [str(run.pairs)]
        for name, value in {"step": float(history.step), **{n: one.value for n, one in zip(names, found)}}.items():
            history.validated.setdefault(name, []).append(value)
        self._record(dataclasses.replace(found[-1], value=statistics.fmean(one.value for one in found)))
        if run.stop_at is not None:
            sign = -1 if self.task.measure == "error" else 1
            history.stopped = all(sign * one.value >= sign * run.stop_at for one in found)
        if history.stopped or history.step == run.steps:
            tested = measure_all(run.seed, run.test_examples)
            history.tested = {name: one.value for name, one in zip(names, tested)}
            history.best_error, history.by_token, history.queries = (
                tested[-1].best, dict(tested[-1].by_token), tested[-1].queries
            )  # fmt: skip

    def _record(self, measured: Measured) -> None:
        history = self.history
        history.accuracy_steps.append(history.step)
        if self.task.measure == "error":
            history.errors.append(measured.value)
        else:
            history.accuracies.append(measured.value)
        history.best_error, history.by_token = measured.best, dict(measured.by_token)
        history.queries = measured.queries

    def _learning_rate(self, step: int) -> float:
        run = self.run
        warmup_steps = round(run.warmup_fraction * run.steps)
        return run.learning_rate * learning_rate_factor(
            step, steps=run.steps, warmup_steps=warmup_steps, final=run.final_fraction, start=run.warmup_start,
            schedule=run.schedule,
        )  # fmt: skip

    def _record_loss(self) -> None:
        history = self.history
        loss = self._window_loss.item() / (history.step - (history.loss_steps[-1] if history.loss_steps else 0))
        self._window_loss.zero_()
        if math.isfinite(loss):
            history.loss_steps.append(history.step)
            history.losses.append(loss)
        else:
            history.diverged = True

    def _evaluation_steps(self) -> set[int]:
        run = self.run
        return {math.ceil(run.steps * part / run.evaluations) for part in range(1, run.evaluations + 1)} | set(
            self.ends
        )

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        self._read_clock()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.take.state(),
            "history": dataclasses.asdict(self.history),
            "window_loss": self._window_loss,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.run.device) if self._window_loss.is_cuda else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from an earlier `state()`."""
        self.model.load_state_dict(state["model"])
        self.take.restore(state["optimizer"])
        self.history = _History(**state["history"])
        self._window_loss.copy_(state["window_loss"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.run.device)

    def result(self) -> RecallResult:
        """The result of the finished run."""
        self._read_clock()
        history = dataclasses.asdict(self.history)
        diverged, stopped = history.pop("diverged"), history.pop("stopped")
        if diverged:
            history.update(best_error=None, by_token={})
        values = list(history["tested"].values())
        final = statistics.fmean(values) if values else None
        return RecallResult(
            run=self.run.record(),
            status="diverged" if diverged else "finished",
            stopped_at=history.pop("step"),
            measure=self.task.measure,
            accuracy=_last(history["accuracies"], final) if not diverged else None,
            error=_last(history["errors"], final) if not diverged else None,
            undertrained=not diverged and not stopped and self._undertrained(),
            parameters=self.model.num_parameters(),
            state_size=self.model.state_size(length=self.task.length),
            versions=versions(),
            machine=machine(self.run.device),
            chance=statistics.fmean(task.chance for _, task in self.run.stages())
            if self.run.mixture
            else self.task.chance,
            **history,
        )

    def _undertrained(self) -> bool:
        steps = self.history.loss_steps
        losses, best = self.history.losses, self.history.best_error
        if best is not None:  # the part that is left of the way from no memory to the best predictor
            losses = [(loss - best) / (self.task.chance - best) for loss in losses]
        learning = list(itertools.accumulate(self._learning_rate(step) for step in range(self.run.steps)))
        return undertrained(steps, losses, [learning[step - 1] for step in steps])

    def _read_clock(self) -> None:
        wall, cpu = self._clock
        self._clock = time.perf_counter(), time.process_time()
        self.history.wall_seconds += self._clock[0] - wall
        self.history.cpu_seconds += self._clock[1] - cpu


def _last(values: Sequence[float], tested: float | None) -> float | None:
    """The value at the end of a run, that of the tested sequences where others were measured before; None without any."""
    return None if not values else values[-1] if tested is None else tested
