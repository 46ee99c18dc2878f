"""The result of one trained language model, and its JSON file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..files import write_json
from ..kinds import checked
from .records import from_record, read_object

__all__ = ["LanguageResult", "load_result", "save_result", "training_record"]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageResult:
    """One trained model and its measurements.

    Attributes:
        name: its mixer; "hybrid" where layers differ.
        folder: of the saved model.
        run: the configuration, as plain values.
        parameters: numbers that were trained.
        state_size: numbers that the memories of all layers hold of a sequence of the run's length.
        steps, tokens: optimizer steps taken, and the tokens read in them.
        loss_steps, losses: the loss curve, nats per token; each point is the mean over the steps since the previous one.
        held_out_steps, held_out_losses: the held-out loss during training, the last one at the end.
        perplexities: held-out perplexity by context length: length, loss, last_loss, texts, joined of each, as
            `fastweights.evaluation.LengthPerplexity` says.
        continuation: the model's continuation of the run's prompt; None without a prompt.
        seconds: wall time of this command's part of the training.
        versions, machine: of the libraries and the hardware.
        held_out_objectives: of a distillation, at the steps of held_out_losses the held-out mean of the loss that it learned by,
            as `losses` has it of the training text; [] of other trainings.
        held_out_kls: of a distillation with a teacher, at these steps the held-out divergence KL(teacher || student), nats per
            token.
        loss_tokens, held_out_tokens: tokens read up to the points of the curves; [] in results of earlier versions, whose steps
            all read as many.
    """

    name: str
    folder: str
    run: dict[str, Any]
    parameters: int
    state_size: int
    steps: int
    tokens: int
    loss_steps: list[int]
    losses: list[float]
    held_out_steps: list[int]
    held_out_losses: list[float]
    perplexities: list[dict[str, Any]]
    continuation: str | None
    seconds: float
    versions: dict[str, str]
    machine: dict[str, Any]
    held_out_objectives: list[float] = dataclasses.field(default_factory=list)
    held_out_kls: list[float] = dataclasses.field(default_factory=list)
    loss_tokens: list[int] = dataclasses.field(default_factory=list)
    held_out_tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name, and that of the stage where it is the model of one."""
        return " ".join(filter(None, (self.name, self.run.get("stage"))))

    @property
    def held_out_loss(self) -> float:
        """At the end of training."""
        return self.held_out_losses[-1]


def save_result(path: Path, result: LanguageResult) -> None:
    write_json(path, dataclasses.asdict(result))


def load_result(path: Path) -> LanguageResult:
    """ResultsError: the file is damaged or of another version."""
    return from_record(LanguageResult, read_object(path), path)


def training_record(model: Path) -> Path | None:
    """run.json of the training whose folder, trained model or checkpoint this is."""
    folder = model.resolve()
    places = [folder]
    if folder.name == "model":
        places.append(folder.parent)
    if folder.parent.name == "checkpoints":
        places.append(folder.parent.parent)
    return next((place / "run.json" for place in places if os.path.lexists(place / "run.json")), None)
