"""What the processes of the tests call: trainings by torchtitan's trainer."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from . import on_cpu  # noqa: F401  # before torchtitan
from . import configs  # noqa: I001


def train(settings: dict[str, Any], steps: int = 4, weights: bool = False, **model: Any) -> dict[str, Any]:
    """Train `configs.small`. settings: by the names that torchtitan's command line has. model: changes to its configuration.

    Returns:
        losses and norms of gradients by step, and with `weights` the parameters after the last.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = configs.small(**model)
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

    trainer.metrics_processor.log = record
    try:
        trainer.train()
        found = {"losses": losses, "norms": norms, "read": trainer.ntokens_seen}
        if weights:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            found["weights"] = get_model_state_dict(trainer.model_parts[0], options=whole)
        return found
    finally:
        trainer.close()
        gc.enable()
        torch.compiler.reset()
