"""Callbacks of a training: its log, TensorBoard, the stop at a step or by a signal."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...checks import error_prefix
from ...files import open_to_append, write_bytes, writing
from ...stopping import StopSignals
from ...untrusted import check_file
from .processes import largest_of_processes
from .schedule import StepPlan

__all__ = [
    "BeforeTraining",
    "NonFiniteLoss",
    "RunLog",
    "StopAt",
    "StopOnSignal",
    "TensorBoardLog",
    "check_finite",
    "loss_curves",
    "read_log",
]


# What a training may measure on held-out text, in transformers' words: the next-token loss and, of a distillation, the loss that
# it learns by and the divergence from the teacher.
HELD_OUT = ("eval_loss", "eval_objective", "eval_kl")


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN. Checkpoints are of steps before."""


def check_finite(logs: dict[str, float], step: int, checkpoints: Callable[[], list[Path]], *, fp16: bool) -> None:
    """NonFiniteLoss where the loss of `logs` is not finite, or the gradient, which fp16 scales down to try again. checkpoints:
    lists those that there are."""
    for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
        if not math.isfinite(logs.get(name, 0.0)) and not (name == "grad_norm" and fp16):
            kept = checkpoints()
            begin = f", with path = {str(kept[-1])!r}, the last checkpoint, in [model]" if kept else ""
            raise NonFiniteLoss(
                f"the {what} is {logs[name]} at step {step}; training has stopped"
                f"{'' if kept else ' before its first checkpoint'}. A smaller learning_rate, a longer warm-up or "
                f'precision = "bf16" or "no" usually help: train so in another output folder{begin}'
            )


class BeforeTraining(TrainerCallback):
    """Does something once model and optimizer are prepared, before the first step."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._work()


class RunLog(TrainerCallback):
    """Appends a JSON line for every point of the loss curves, as soon as it is known. A training that continues first drops
    the lines after its checkpoint, whose steps it takes again."""

    def __init__(self, path: Path, plan: StepPlan) -> None:
        self._path, self._plan = path, plan

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            kept = [point for point in read_log(self._path) if point["step"] <= state.global_step]
            write_bytes(self._path, "".join(map(_line, kept)).encode())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        point: dict[str, Any] = {"step": state.global_step, "tokens": self._plan.tokens(state.global_step)}
        if "loss" in logs:
            norm = logs.get("grad_norm", 0.0)
            point["gradient_norm"] = norm if math.isfinite(norm) else None  # fp16 scales down and tries again
            point |= {"loss": logs["loss"], "learning_rate": logs["learning_rate"]}
        elif "eval_loss" in logs:
            point |= {held_out_name(name): x for name, x in logs.items() if name in HELD_OUT}
        else:
            return
        if state.is_world_process_zero:
            with writing(self._path.name, self._path.parent), open_to_append(self._path) as file:
                file.write(_line(point))


class StopAt(TrainerCallback):
    """Ends a training with a checkpoint after a step. It also has the loss logged before every checkpoint: no checkpoint of a
    model whose loss is not finite is saved."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True
        control.should_log = control.should_log or control.should_save


class StopOnSignal(TrainerCallback):
    """Ends a training with a checkpoint after the step in which a signal arrived, in any of its processes.

    The processes agree after every step, between their processors: no GPU waits for it.
    """

    def __init__(self, signals: StopSignals, report: Callable[[str], None]) -> None:
        self._signals, self._report = signals, report

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        number = largest_of_processes(self._signals.received or 0)
        if number:
            self._signals.received = number
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_training_stop and self._signals.received is not None:
            name = signal.Signals(self._signals.received).name
            self._report(f"{name}: stopped after step {state.global_step:,}, which is saved")


class TensorBoardLog(TrainerCallback):
    """The same points for TensorBoard. Those after the checkpoint that a training continues from are taken back.

    Raises:
        ValueError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("tensorboard = true needs tensorboard; pip install 'fastweights[train]'") from None
        self._folder = folder
        self._open = lambda step: SummaryWriter(str(folder), purge_step=step)
        self._writer: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            with writing("the TensorBoard log", self._folder):
                self._writer = self._open(state.global_step + 1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self._writer is not None:
            with writing("the TensorBoard log", self._folder):
                for name in ("loss", "grad_norm", "learning_rate", *HELD_OUT):
                    if name in logs:
                        self._writer.add_scalar(name, logs[name], state.global_step)
                self._writer.flush()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The points of a log; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    with error_prefix("log"):
        check_file(path, None)
    lines = path.read_bytes().splitlines(keepends=True)
    points = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                points.append(json.loads(line))
                int(points[-1]["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"log {path} is damaged in line {number} ({error}); delete that line to continue without its point"
                ) from None
    return points


def loss_curves(path: Path) -> dict[str, Any]:
    """The fields of a result that hold the points of a log."""
    points = read_log(path)
    train = [point for point in points if "loss" in point]
    held_out = [point for point in points if "held_out_loss" in point]
    return {
        "loss_steps": [point["step"] for point in train],
        "loss_tokens": [point["tokens"] for point in train],
        "losses": [point["loss"] for point in train],
        "held_out_steps": [point["step"] for point in held_out],
        "held_out_tokens": [point["tokens"] for point in held_out],
        "held_out_losses": [point["held_out_loss"] for point in held_out],
        "held_out_objectives": [point["held_out_objective"] for point in held_out if "held_out_objective" in point],
        "held_out_kls": [point["held_out_kl"] for point in held_out if "held_out_kl" in point],
    }


def held_out_name(name: str) -> str:
    """transformers' name of a held-out number as the log has it."""
    return name.replace("eval_", "held_out_")


def _line(point: dict[str, Any]) -> str:
    return json.dumps(point, allow_nan=False) + "\n"
