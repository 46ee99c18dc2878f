"""What the processes of the tests call: trainings by torchtitan's trainer."""

from __future__ import annotations

import gc
import os
import time
from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from fastweights.testing.processes import Processes, processes

from . import configs


@cache
def started(count: int) -> Processes:
    """Processes that have imported torchtitan, which takes seconds."""
    found = processes(count)
    found.run(ready)
    return found


def ready() -> None:
    """What the processes do first."""


def refusal(settings: dict[str, Any], model: dict[str, Any]) -> str:
    """The message of the ValueError that a training raises; "" where it raises none."""
    try:
        train(settings, 1, False, model)
    except ValueError as error:
        return str(error)
    return ""


def train(
    settings: dict[str, Any], steps: int = 4, weights: bool = False, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train `configs.small`. settings: by the names that torchtitan's command line has. model: changes to its configuration.

    Returns:
        losses and norms of gradients by step, tokens read, losses of validation; with `weights` the parameters after the last
        step, and the logits of row 0.
    """
    if dist.is_initialized():  # otherwise torchrun has set it
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = configs.small(**(model or {}))
    config.training.steps = steps
    for name, value in settings.items():
        *path, last = name.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, last), name
        setattr(owner, last, value)
    trainer = config.build()
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}

    def record(step: int, loss: float, largest: float, norm: float, **extra: Any) -> None:
        losses[step], norms[step] = loss, norm

    validated: list[float] = []
    trainer.metrics_processor.log = record
    trainer.metrics_processor.log_validation = lambda loss, step, **extra: validated.append(loss)
    try:
        with patch(
            "torchtitan.trainer.time", Mock(wraps=time, sleep=lambda seconds: None)
        ):  # 2 seconds, after the last step
            trainer.train()
        found = {"losses": losses, "norms": norms, "read": trainer.ntokens_seen, "validated": validated}
        if weights:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model = trainer.model_parts[0]
            found["weights"] = get_model_state_dict(model, options=whole)
            tokens, _, positions = configs.made_up_row(0, configs.LENGTH)
            with torch.no_grad():
                model._skip_lm_head = False
                logits = model(tokens[None], positions[None])
            found["logits"] = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return found
    finally:
        trainer.close()
        gc.enable()
        torch.compiler.reset()
