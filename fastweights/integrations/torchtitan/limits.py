"""Settings of torchtitan's trainer that do not fit these models, refused before anything is built."""

from __future__ import annotations

from typing import Any

import torch

from .trainer import FastWeightsTrainer, FastWeightsValidator

__all__ = ["check_settings"]


def check_settings(config: Any) -> None:
    """Refuse a `Trainer.Config` that these models cannot follow.

    Raises:
        ValueError: torch is older than torchtitan needs; pipeline, expert or sequence parallelism; another backend than
            "partial_dtensor"; or a trainer or validation that would divide rows for context parallelism by itself.
    """
    if not hasattr(torch.distributed, "set_timeout"):
        raise ValueError(f"torch must be 2.14 or later for torchtitan, got {torch.__version__}; install a later one")
    parallel = config.parallelism
    for name in ("pipeline_parallel_degree", "expert_parallel_degree"):
        degree = getattr(parallel, name)
        if degree > 1:
            raise ValueError(
                f"parallelism.{name} must be 1 for models of fastweights, got {degree}; divide them otherwise"
            )
    if parallel.spmd_backend != "partial_dtensor":
        raise ValueError(
            'parallelism.spmd_backend must be "partial_dtensor" for models of fastweights, whose layers compute on ordinary '
            f'tensors, got "{parallel.spmd_backend}"'
        )
    if parallel.tensor_parallel_degree > 1 and parallel.enable_sequence_parallel:
        raise ValueError(
            "parallelism.enable_sequence_parallel must be False for models of fastweights, whose memories read whole sequences; "
            "context parallelism divides them (parallelism.context_parallel_degree)"
        )
    if parallel.context_parallel_degree > 1:
        ours = isinstance(config, FastWeightsTrainer.Config)
        validates = config.validator.enable and not isinstance(config.validator, FastWeightsValidator.Config)
        if not ours or validates:
            raise ValueError(
                "context parallelism needs the trainer and the validator of fastweights, as torchtitan's give every process "
                "a part of each row; take the configuration from fastweights.integrations.torchtitan.config_registry"
            )
