"""The progress of a training: a bar on a terminal, a line every `log_every` steps elsewhere; the time left in both."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..progress import TimeLeft, progress_bars

__all__ = ["TrainingProgress"]


class TrainingProgress(TrainerCallback):
    """Shows step, loss, tokens per second, memory and time left on `console`, in the main process. A context manager."""

    def __init__(self, console: Console, *, title: str, tokens_a_step: int, steps: int, log_every: int) -> None:
        self._console, self._title, self._tokens, self._steps = console, title, tokens_a_step, steps
        self._log_every = log_every
        self._bar = progress_bars(console)
        self._task = self._bar.add_task(title, total=steps, note="")
        self._since, self._step = time.monotonic(), 0
        self._left = TimeLeft(0, steps)
        self._training = self._held_out = self._machine = ""

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step, self._since = state.global_step, time.monotonic()
        self._left = TimeLeft(state.global_step, self._steps)
        if state.global_step:
            self._print(f"continues after step {state.global_step:,}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        if "eval_loss" in logs:
            self._held_out = f"held-out loss {logs['eval_loss']:.3f}"
        elif "loss" in logs and state.global_step > self._step:
            speed = (state.global_step - self._step) * self._tokens / max(now - self._since, 1e-9)
            self._training = f"loss {logs['loss']:.3f}"
            self._machine = f"{speed:,.0f} tokens/s, {memory():.1f} GB"
        else:
            return
        self._since, self._step = now, state.global_step
        note = ", ".join(filter(None, (self._training, self._held_out, self._machine)))
        step = state.global_step
        self._bar.update(self._task, note=f"{step:,}/{self._steps:,}, {note}")
        due = not self._console.is_terminal and "loss" in logs and step % self._log_every == 0 and step < self._steps
        if step == self._steps and "eval_loss" in logs:
            self._print(f"step {step:,} of {self._steps:,}, {note}")
        elif due:
            self._print(f"step {step:,} of {self._steps:,}, {note}, {self._left.after(step)} left")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since, self._step = time.monotonic(), state.global_step  # saving is not training

    def _print(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", markup=False, highlight=False, soft_wrap=True)


def memory() -> float:
    """Memory in GB: the peak of this process on its GPU, or without a GPU its present use of main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
