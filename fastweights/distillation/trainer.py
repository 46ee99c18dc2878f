"""The training of language models with the objective of a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..data.text import PreparedText
from ..training.language.folder import LanguageFolder
from ..training.language.rows import DataStart
from ..training.language.trainer import LanguageTrainer
from .cache import RowCache
from .objectives import Objective
from .run import DistillRun
from .teacher import HIDDEN, INPUTS, Teacher

__all__ = ["DistillTrainer"]


class DistillTrainer(LanguageTrainer):
    """Trains a student as a `DistillRun` says. accelerate, the optimizer and checkpoints do not see the teacher."""

    run: DistillRun

    def __init__(
        self,
        run: DistillRun,
        model: Any,
        text: PreparedText,
        folder: LanguageFolder,
        callbacks: list[TrainerCallback],
        earlier: Path | None = None,
        start: DataStart | None = None,
    ) -> None:
        super().__init__(run, model, text, folder, callbacks, earlier, start)
        self.teacher = make_teacher(run, model, self.args.device) if run.needs_teacher else None
        objective = Objective(run, model, self.teacher)
        self.measured = objective.measured
        model.forward = objective

    def blocks_of(self, model: Any) -> list[torch.nn.Module]:
        blocks = super().blocks_of(model)
        return [*model.memory_layers().values(), *blocks] if self.run.objective == "attention" else blocks

    def prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch, with what the teacher computes of it."""
        batch = super().prepare_inputs(inputs)
        if self.teacher is None or not batch.keys().isdisjoint((HIDDEN, INPUTS)):
            return batch
        observes = self.run.objective == "attention"
        read = self.teacher.read(batch, observe=observes)
        if observes and self.model.training:
            del read[HIDDEN]
        return {**batch, **read}

    def measure(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        return self.model(**batch)["measured"]


def make_teacher(run: DistillRun, student: Any, device: torch.device) -> Teacher:
    """The teacher of a run, on a device."""
    cache = None
    if isinstance(run.cache_teacher, str):
        cache = RowCache(run.cache_teacher, f"{run.teacher_content}-{run.teacher_dtype}")
    layers = list(student.memory_layers()) if run.objective == "attention" else []
    return Teacher(
        run.teacher,
        run.teacher_dtype,
        device,
        layers=layers,
        length=run.length,
        cache=cache,
        shared=bool(run.fsdp),
    )
