"""One training of `linearization.py`, in a process of its own, with what is measured of its model."""

from __future__ import annotations

import _thread
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastweights.distillation import DistillRun, distill
from fastweights.evaluation import EvaluationSettings, evaluate, load_language_model
from fastweights.results import LanguageResult, RulerRecall
from fastweights.stopping import Stopped, StopSignals
from fastweights.training.language import LanguageRun, NonFiniteLoss, train_language
from fastweights.training.pool import Worker
from fastweights_studies.record import Plain
from fastweights_studies.timer import calling_after

from .rows import Value

__all__ = ["CLOSE", "Measured", "Training", "tokens_until"]

CLOSE = 0.05  # nats
SHORTEST = 15.0  # seconds that must be left for a training to begin


@dataclass(frozen=True)
class Measured:
    """What was measured of a model.

    Attributes:
        by_length: values by the names of measures, of what depends on a context by its tokens, all else at None.
        run: what they depend on.
    """

    by_length: Mapping[int | None, Mapping[str, Value]]
    run: Mapping[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training and the measurements of its model. Its result is None where it stopped, or time was over before it began.

    Attributes:
        run: a `LanguageRun` or a `DistillRun`. write: writes the model that it begins with, where that is missing.
        asked: what is measured.
        limit: seconds. until: when it stops before that, in seconds since the epoch.
        near: the held-out loss that it is to come near to; None for none.
        subject: fields of its rows.
    """

    name: str
    run: LanguageRun
    write: Callable[[], None]
    asked: EvaluationSettings
    limit: float
    until: float = math.inf
    near: float | None = None
    subject: Mapping[str, Any]

    def __call__(self, worker: Worker | None) -> Measured | None:
        over, seconds = threading.Event(), min(self.limit, self.until - time.time())
        if seconds < SHORTEST < self.limit:
            return None
        with StopSignals() as signals, worker.requests_as_signals() if worker else nullcontext():
            try:
                with interrupted_after(seconds, over):
                    return self._measure(signals)
            except NonFiniteLoss:
                return Measured({None: {"held_out_nats": None}})
            except Stopped:
                if over.is_set():
                    return None
                raise

    def _measure(self, signals: StopSignals) -> Measured:
        self.write()
        carry_out: Any = distill if isinstance(self.run, DistillRun) else train_language
        results: list[LanguageResult] = carry_out(self.run, signals=signals)
        last, curve = results[-1], held_out_curve(results)
        values: dict[str, Value] = {"held_out_nats": last.held_out_loss, "state": last.state_size}
        if last.held_out_kls:
            values["kl_nats"] = last.held_out_kls[-1]
        if self.near is not None:
            values["tokens_until_near"] = tokens_until(curve, self.near + CLOSE)
        by_length: dict[int | None, dict[str, Value]] = {None: values}
        by_length |= measure_answers(Path(last.folder), self.asked)
        return Measured(by_length, {"tokens": sum(one.tokens for one in results), "parameters": last.parameters})


@contextmanager
def interrupted_after(seconds: float, over: threading.Event) -> Iterator[None]:
    """After so many seconds the body gets SIGTERM, and `over` is set."""

    def interrupt() -> None:
        over.set()
        _thread.interrupt_main(signal.SIGTERM)

    with calling_after(seconds, interrupt):
        yield


def held_out_curve(results: Sequence[LanguageResult]) -> list[tuple[int, float]]:
    """Tokens read up to each measurement, in all stages, and the held-out loss there."""
    curve, before = [], 0
    for result in results:
        curve += [(before + n, x) for n, x in zip(result.held_out_tokens, result.held_out_losses, strict=True)]
        before += result.tokens
    return curve


def tokens_until(curve: Sequence[tuple[int, float]], loss: float) -> int | None:
    """The tokens at the first point of a curve that is not above a loss; None where all are."""
    return next((tokens for tokens, value in curve if value <= loss), None)


def measure_answers(folder: Path, asked: EvaluationSettings) -> dict[int | None, dict[str, Value]]:
    """Recall and needles of a saved model by length: those of all depths together.

    `recall_exact`: part of the questions of whose answer each token is the most likely one. `needle_nats`: mean loss of the
    tokens of the number, `needle_found`: part of the numbers that stand in the model's continuation.
    """
    on_gpu = torch.cuda.is_available()
    chosen: dict[str, Any] = (
        {"device": "cuda", "dtype": "bfloat16"} if on_gpu else {}
    )  # the dtype whose kernels training has compiled
    model, tokenizer = load_language_model(folder, **chosen)
    found: dict[int | None, dict[str, Value]] = {length: {} for length in asked.lengths}
    needles: dict[int, list[Any]] = {}
    for _, rows in evaluate(model, tokenizer, asked):
        for row in rows:
            if isinstance(row, RulerRecall):
                found[row.length]["recall_exact"] = row.exact
            else:
                needles.setdefault(row.length, []).append(row)
    for length, rows in needles.items():
        found[length]["needle_nats"] = statistics.mean(row.answer_loss for row in rows)
        found[length]["needle_found"] = statistics.mean(row.found for row in rows)
    return found
