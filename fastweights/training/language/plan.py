"""What a training would do, without doing it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ...data.text import TextTokenizer
from ...models import FastWeightsForCausalLM
from ..folder import as_stored
from .checkpoints import checkpoint_step, checkpoints_in
from .folder import LanguageFolder, world_size
from .launch import step_size
from .model import mixer_name, model_config, model_tokenizer
from .run import LanguageRun
from .train import check_training

__all__ = ["plan_training"]


def plan_training(run: LanguageRun, *, stop_at: int | None = None, overwrite: bool = False) -> dict[str, Any]:
    """The settings of a run, and for each of its models the number of parameters, where its training begins and where it goes.
    Nothing is written. Of the text of local files the first document is read.

    A tokenizer that is still to be trained is taken to have as many tokens as it may.

    Raises:
        ValueError: as `train_language`, but for text and tokenizer.
    """
    singles = check_training(run, stop_at=stop_at, overwrite=overwrite)
    settings = model_tokenizer(singles[0])
    if run.corpus.dataset is None:
        next(run.corpus.documents(), None)  # raises where there is none
    return {
        "settings": as_stored(dataclasses.asdict(run)),
        "step": step_size(run),
        "models": [_planned(single, settings, overwrite) for single in singles],
    }


def _planned(run: LanguageRun, tokenizer: TextTokenizer, overwrite: bool) -> dict[str, Any]:
    if tokenizer.path is not None:
        config = model_config(run, tokenizer.load())
    elif "path" in run.model:
        config = model_config(run)
    else:
        config = model_config(dataclasses.replace(run, model={"vocab_size": tokenizer.vocab_size, **run.model}))
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    return {
        "name": mixer_name(config),
        "parameters": model.num_parameters(),
        "state size": model.state_size(run.length),
        "steps": run.max_steps,
        "tokens": run.max_steps * run.length * run.batch_size * run.accumulation * world_size(),
        "begins": _begin(run, overwrite),
        "output": run.output,
    }


def _begin(run: LanguageRun, overwrite: bool) -> str:
    folder = LanguageFolder(Path(run.output))
    saved = checkpoints_in(folder.checkpoints)
    if overwrite or not (folder.result.exists() or saved):
        return "from the start"
    return "has ended" if folder.result.exists() else f"after step {checkpoint_step(saved[-1]):,}"
