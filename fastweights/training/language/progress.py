"""The progress of a training, and of the text before it: a bar on a terminal, lines elsewhere; the time left in both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..progress import Display, TimeLeft, rate
from .schedule import StepPlan

__all__ = ["TextProgress", "TrainingProgress", "line_printer"]

TEXT_SECONDS = 10.0  # between two lines on the text


def line_printer(console: Console) -> Callable[[str], None]:
    """A function that prints a line as it is, of any length."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


class TextProgress:
    """Shows what a slow step of `prepare_text` does, and how much text it has read, on `console`. A context manager."""

    def __init__(self, console: Console) -> None:
        self._display = Display(console)
        self._work, self._due = "", 0.0
        self._left: TimeLeft | None = None

    def __enter__(self) -> TextProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.__exit__()

    def __call__(self, work: str, done: int, total: int | None) -> None:
        """`done` of about `total` characters are read; `work` begins where they are 0."""
        now = time.monotonic()
        if work != self._work:
            self._work, self._due = work, now
            self._left = None if total is None else TimeLeft(done, total)
            self._display.__enter__()
        of = "" if total is None else f" of about {max(done, total) / 1e6:,.1f}"
        note = f"{done / 1e6:,.1f}{of} MB"
        self._display.show_bar("text", self._work, title=work, total=total, done=done, note=note)
        if not self._display.is_terminal and now >= self._due:
            self._due = now + TEXT_SECONDS
            left = f", {self._left.after(done)} left" if self._left is not None and done else ""
            self._display.print_line(f"{work}: {note}{left}")


class TrainingProgress(TrainerCallback):
    """Shows step, loss, tokens per second, memory and time left on `console`, in the main process. A context manager."""

    def __init__(self, console: Console, *, title: str, plan: StepPlan, log_every: int) -> None:
        self._display, self._title, self._plan, self._steps = Display(console), title, plan, plan.steps
        self._log_every = log_every
        self._since, self._step = time.monotonic(), 0
        self._left = TimeLeft(0, self._steps)
        self._note = self._training = self._held_out = self._machine = ""
        self._measured = 0  # step of the held-out loss

    def __enter__(self) -> TrainingProgress:
        self._display.__enter__()
        self._show(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.__exit__()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step, self._since = state.global_step, time.monotonic()
        self._left = TimeLeft(state.global_step, self._steps)
        if state.global_step:
            self._print(f"continues after step {state.global_step:,}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        now, step = time.monotonic(), state.global_step
        if "eval_loss" in logs:
            kl = f", KL {logs['eval_kl']:.4f}" if "eval_kl" in logs else ""
            self._held_out, self._measured = f"held-out loss {logs['eval_loss']:.3f}{kl}", step
        elif "loss" in logs and step > self._step:
            speed = (self._plan.tokens(step) - self._plan.tokens(self._step)) / max(now - self._since, 1e-9)
            self._training = f"loss {logs['loss']:.3f}"
            self._machine = f"{rate(speed)} tokens/s, {memory():.1f} GB"
        else:
            return
        self._since, self._step = now, step
        earlier = "" if self._measured == step else f" at step {self._measured:,}"
        held_out = self._held_out + earlier * bool(self._held_out)
        shown = (f"{step:,}/{self._steps:,}", self._training, held_out, self._machine)
        self._note = ", ".join(filter(None, shown))
        self._show(step)
        if step == self._steps:
            if "eval_loss" in logs:
                self._line(step, self._training, self._held_out, self._machine)
        elif not self._display.is_terminal:
            if "eval_loss" in logs:
                self._line(step, self._held_out)
            elif step % self._log_every == 0:
                self._line(step, self._training, self._machine, f"{self._left.after(step)} left")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since, self._step = time.monotonic(), state.global_step  # saving is not training

    def _show(self, step: int) -> None:
        self._display.show_bar("training", self, title=self._title, total=self._steps, done=step, note=self._note)

    def _line(self, step: int, *parts: str) -> None:
        self._print(", ".join([f"step {step:,} of {self._steps:,}", *filter(None, parts)]))

    def _print(self, text: str) -> None:
        self._display.print_line(f"{self._title}: {text}")


def memory() -> float:
    """Memory in GB: the peak of this process on its GPU, or without a GPU its present use of main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
