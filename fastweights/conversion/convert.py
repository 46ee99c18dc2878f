"""Continue a trained model with another memory: same weights, first values for new parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedConfig, PreTrainedModel

from ..checks import check_text, check_whole_number, describe_value
from ..kinds import checked
from ..models import FastWeightsConfig, FastWeightsForCausalLM
from .mamba2 import mamba2_config, mamba2_weights
from .plan import conversions_between, converted_config

__all__ = ["check_source", "convert", "fitting_config", "own_config", "set_value"]


@checked
def convert(model: PreTrainedModel, *, to: str, seed: int = 0, **options: Any) -> FastWeightsForCausalLM:
    """A copy of `model` whose layers are of the mixer `to`, on the same device and in the same dtype.

    All weights carry over. What the new mixer adds starts from first values; `CONVERSIONS` says which, and at which
    neutral setting the copy computes what the model does (`check_logits` measures it). As it is returned it computes
    something else: train it on. Layers of other mixers (attention in a hybrid) stay as they are.

    Args:
        model: a `FastWeightsForCausalLM`, or a `Mamba2ForCausalLM` of transformers. It is left as it is.
        to: name of the new mixer.
        seed: of the first values that are random. torch's own random state is not touched.
        options: of the new mixer, in place of those that carry over or of its defaults.

    Raises:
        ValueError: no layer continues as `to`, or an option cannot be carried over or does not fit.
        TypeError: a model of another kind.
    """
    check_source("model", model)
    check_whole_number("seed", seed)
    before = own_config(model.config)
    after = fitting_config(before, to, options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and not the generators of other devices
        converted = FastWeightsForCausalLM(after)
    new: tuple[str, ...] = ()
    for index, conversion in conversions_between(before, after).items():
        layer = converted.model.layers[index].mixer
        new += tuple(f"model.layers.{index}.mixer.{prefix}" for prefix in conversion.new)
        for name, value in conversion.start.items():
            if name in dict(layer.named_parameters()):
                set_value(layer, name, value)
    missing, unexpected = converted.load_state_dict(_rename_weights(model), strict=False)
    lost = [name for name in missing if not name.startswith(new)] + unexpected
    if lost:
        raise ValueError(f"the parameters {', '.join(lost)} of the source have no counterpart in {to!r}")
    converted.generation_config = copy.deepcopy(model.generation_config)
    converted.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides self
    return converted.train(model.training)


def check_source(name: str, model: object) -> None:
    """TypeError unless conversions start from models of its kind."""
    if not isinstance(model, (FastWeightsForCausalLM, Mamba2ForCausalLM)):
        raise TypeError(
            f"{name} must be a FastWeightsForCausalLM or transformers' Mamba2ForCausalLM, got {describe_value(model)}"
        )


def fitting_config(before: FastWeightsConfig, to: str, options: Mapping[str, Any]) -> FastWeightsConfig:
    """`converted_config`, known to take the weights that it shares with the source.

    Raises:
        ValueError: an option that is wrong by itself, or that needs weights of another shape.
    """
    check_text("to", to, what="the name of a mixer")
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(f"options must be a dict of values by their names, got {describe_value(options)}")
    after = converted_config(before, to, options)
    with torch.device("meta"):  # shapes only
        there, here = (FastWeightsForCausalLM(config).state_dict() for config in (before, after))
    for name, weight in there.items():
        if name in here and weight.shape != here[name].shape:
            raise ValueError(
                "options must keep the sizes of the source's weights, which do not fit "
                f"{', '.join(f'{option}={value}' for option, value in options.items())}: "
                f"{name} is {list(weight.shape)} and would be {list(here[name].shape)}; leave out options that change sizes"
            )
    return after


def own_config(config: PreTrainedConfig) -> FastWeightsConfig:
    """The configuration itself, or that of the same model in this library."""
    if isinstance(config, Mamba2Config):
        return mamba2_config(config)
    assert isinstance(config, FastWeightsConfig)
    return config


@torch.no_grad()
def set_value(layer: nn.Module, name: str, value: float | Tensor) -> float | Tensor:
    """Set an attribute, or all elements of a parameter, to a value; returns the earlier value."""
    path, _, attribute = name.rpartition(".")
    owner = layer.get_submodule(path)
    present = getattr(owner, attribute)
    if not isinstance(present, Tensor):
        setattr(owner, attribute, value)
        return present
    before = present.clone()
    present.copy_(torch.as_tensor(value))
    return before


def _rename_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return mamba2_weights(model) if isinstance(model, Mamba2ForCausalLM) else model.state_dict()
