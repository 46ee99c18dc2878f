"""What an evaluation would measure, without measuring it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..models import FastWeightsForCausalLM
from ..models.loading import load_config, model_folder
from .evaluate import EvaluationSettings

__all__ = ["plan_evaluation"]


def plan_evaluation(
    model: Path, settings: EvaluationSettings, tasks: Sequence[str] = (), *, text: str, output: Path
) -> dict[str, Any]:
    """The model in a folder with its number of parameters, the settings and the file of the results. Weights are not read, and
    nothing is written.

    Args:
        tasks: of lm-evaluation-harness.
        text: what a report calls the text.

    Raises:
        ValueError: no model of this library in the folder.
    """
    config = load_config(model_folder(model))
    with torch.device("meta"):
        parameters = FastWeightsForCausalLM(config).num_parameters()
    return {
        "model": str(model), "parameters": parameters, "settings": dataclasses.asdict(settings), "lm-eval": list(tasks),
        "text": text, "output": str(output),
    }  # fmt: skip
