"""The bundle of a model and its callables that torchtitan's trainer is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.model_spec import ModelSpec

from ...models import FastWeightsConfig, preset
from ...models.loading import load_config
from ...training.optimization import weight_decay_groups
from .checkpoints import SavedFolder
from .model import TitanModel
from .parallelize import parallelize

__all__ = ["build_spec", "spare_from_weight_decay"]


def build_spec(flavor: str | Path | FastWeightsConfig) -> ModelSpec:
    """See `fastweights.integrations.torchtitan.model_registry`."""
    name, config = read_flavor(flavor)
    return ModelSpec(
        name="fastweights",
        flavor=name,
        model=TitanModel.Config(architecture=config),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=spare_from_weight_decay,
        state_dict_adapter=SavedFolder,
    )


def read_flavor(flavor: str | Path | FastWeightsConfig) -> tuple[str, FastWeightsConfig]:
    """Name and configuration of a model."""
    if isinstance(flavor, FastWeightsConfig):
        return "own", flavor
    if Path(flavor).is_dir():
        return Path(flavor).name, load_config(Path(flavor))
    return str(flavor), preset(str(flavor))


def spare_from_weight_decay(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """Move norms, biases and decay parameters of every group of torchtitan's optimizers into a group without weight decay."""
    spared = {
        id(parameter)
        for part in model_parts
        for group in weight_decay_groups(part, 1.0)
        if not group["weight_decay"]
        for parameter in group["params"]
    }
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            pairs = list(zip(group["params"], group["param_names"], strict=True))
            decayed, others = (
                [pair for pair in pairs if (id(pair[0]) in spared) == inside] for inside in (False, True)
            )
            if group.get("weight_decay") and others:
                settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
                group["params"], group["param_names"] = (
                    (list(x) for x in zip(*decayed, strict=True)) if decayed else ([], [])
                )
                parameters, names = zip(*others, strict=True)
                optimizer.add_param_group(
                    {**settings, "params": list(parameters), "param_names": list(names), "weight_decay": 0.0}
                )
