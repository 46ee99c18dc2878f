"""Continue a trained model with another memory: same weights, first values for new parameters. And compare the logits of both on
the same tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mamba2ForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3NextForCausalLM

from ..checks import check_tensor, check_text, check_whole_number, describe_value, shape_of
from ..kinds import checked
from ..layers import Mixer, build_mixer
from ..models import FastWeightsConfig, FastWeightsForCausalLM
from .mamba2 import mamba2_config, mamba2_layer, mamba2_layer_weights, mamba2_weights
from .plan import Conversion, converted_config, find_conversions
from .qwen3_next import qwen3_next_config, qwen3_next_layer, qwen3_next_layer_weights, qwen3_next_weights

__all__ = ["LogitsCheck", "check_logits", "compute_logits", "convert", "convert_layer", "fitting_config", "own_config"]

LARGEST_ROUNDING = 1e-3  # of the largest logit: far above rounding in float32
# Models of transformers that have a form here, by their model_type: configuration and weights of the same model.
FOREIGN: dict[str, tuple[Any, Any]] = {
    "mamba2": (mamba2_config, mamba2_weights),
    "qwen3_next": (qwen3_next_config, qwen3_next_weights),
}
# Layers of transformers, by their class: the model_type of their models, the setting that counts their heads, and functions for
# the mixer and the weights of the same layer.
LAYERS: dict[str, tuple[str, str, Any, Any]] = {
    "Mamba2Mixer": ("mamba2", "num_heads", mamba2_layer, mamba2_layer_weights),
    "Qwen3NextGatedDeltaNet": ("qwen3_next", "linear_num_key_heads", qwen3_next_layer, qwen3_next_layer_weights),
}
SOURCES = (FastWeightsForCausalLM, Mamba2ForCausalLM, Qwen3NextForCausalLM)


@checked
def convert(model: PreTrainedModel, *, to: str, seed: int = 0, **options: Any) -> FastWeightsForCausalLM:
    """A copy of `model` whose layers are of the mixer `to`, on the same device and in the same dtype.

    All weights carry over. What the new mixer adds starts from first values; `CONVERSIONS` says which, and at which
    neutral setting the copy computes what the model does (`check_logits` measures it). As it is returned it computes
    something else: train it on. Layers of other mixers (attention in a hybrid) stay as they are.

    Args:
        model: a `FastWeightsForCausalLM`, or a `Mamba2ForCausalLM` or `Qwen3NextForCausalLM` of transformers, the latter without
            attention and experts. It is left as it is.
        to: name of the new mixer.
        seed: of the first values that are random. torch's own random state is not touched.
        options: of the new mixer, in place of those that carry over or of its defaults.

    Raises:
        ValueError: no layer continues as `to`, or an option cannot be carried over or does not fit.
        TypeError: a model of another kind.
    """
    _check_source("model", model)
    check_whole_number("seed", seed)
    before = own_config(model.config)
    after = fitting_config(before, to, options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and not the generators of other devices
        converted = FastWeightsForCausalLM(after)
    new: tuple[str, ...] = ()
    for index, conversion in find_conversions(before, after).items():
        layer = converted.model.layers[index].mixer
        new += tuple(f"model.layers.{index}.mixer.{prefix}" for prefix in conversion.new)
        for name, value in conversion.start.items():
            if name in dict(layer.named_parameters()):
                _set_value(layer, name, value)
    weights = model.state_dict()
    if not isinstance(model, FastWeightsForCausalLM):
        _, rename_weights = FOREIGN[model.config.model_type]
        weights = rename_weights(model.config, weights)
    missing, unexpected = converted.load_state_dict(weights, strict=False)
    lost = [name for name in missing if not name.startswith(new)] + unexpected
    if lost:
        raise ValueError(f"the parameters {', '.join(lost)} of the source have no counterpart in {to!r}")
    converted.generation_config = copy.deepcopy(model.generation_config)
    converted.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides self
    return converted.train(model.training)


@checked
def convert_layer(layer: nn.Module, config: PreTrainedConfig) -> Mixer:
    """The mixer that computes what one layer of a model of transformers does, with its weights, on its device and in its dtype.

    The other layers of its model need no counterpart here. A whole model runs on this library's ops after
    `fastweights.integrations.transformers.accelerate`.

    Args:
        layer: a `Mamba2Mixer`, or a `Qwen3NextGatedDeltaNet`, whatever other layers its model has. It is left as it is.
        config: the configuration of its model.

    Raises:
        TypeError: a layer or a configuration of another kind.
        ValueError: a setting that does not carry over.
    """
    kind = type(layer).__name__
    if kind not in LAYERS:
        raise TypeError(f"layer must be one of transformers' {', '.join(LAYERS)}, got {kind}")
    model_type, heads, make_mixer, rename_weights = LAYERS[kind]
    if config.model_type != model_type:
        raise TypeError(f"config must be that of the model of a {kind}, got {type(config).__name__}; pass model.config")
    with torch.device("meta"):
        mixer = build_mixer(hidden_size=config.hidden_size, num_heads=getattr(config, heads), **make_mixer(config))
    weights = rename_weights(config, layer.state_dict())
    mixer.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    return mixer.train(layer.training)


def _check_source(name: str, model: object) -> None:
    """TypeError unless conversions start from models of its kind."""
    if not isinstance(model, SOURCES):
        kinds = ", ".join(kind.__name__ for kind in SOURCES[1:])
        raise TypeError(
            f"{name} must be a FastWeightsForCausalLM or one of transformers' {kinds}, got {describe_value(model)}"
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
    if isinstance(config, FastWeightsConfig):
        return config
    make_config, _ = FOREIGN[config.model_type]
    return make_config(config)


@torch.no_grad()
def _set_value(layer: nn.Module, name: str, value: float | Tensor) -> float | Tensor:
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


@checked
@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """How far the logits of a converted model are from those of its source.

    Attributes:
        tokens: how many tokens were read.
        largest_logit: of the source, by absolute value: what the differences compare with.
        neutral: largest difference at the neutral setting, None where there is none.
        saved: largest difference of the model as it is.
    """

    tokens: int
    largest_logit: float
    neutral: float | None
    saved: float

    def insist(self) -> None:
        """Refuse a conversion whose logits are wrong.

        Raises:
            ValueError: logits that are not finite, or differ at the neutral setting by more than rounding.
        """
        if not math.isfinite(self.largest_logit + self.saved):
            raise ValueError("the logits of the source or of its continuation are not finite")
        if self.neutral is not None and not self.neutral <= LARGEST_ROUNDING * self.largest_logit:
            raise ValueError(
                f"the logits must agree at the neutral setting and differ by {self.neutral:.3g}, where the largest is "
                f"{self.largest_logit:.3g}; leave out options that change what the source computes"
            )


@checked
@torch.no_grad()
def check_logits(source: PreTrainedModel, converted: FastWeightsForCausalLM, tokens_BT: Tensor) -> LogitsCheck:
    """Run both models on tokens_BT, int64 [B, T]; the converted one at the neutral setting too, if there is one. Both are
    left as they are.

    Raises:
        TypeError: `source` or `converted` is no model of the kind.
        ValueError: models of different layers, or tokens that are none of the vocabulary.
    """
    if not isinstance(converted, FastWeightsForCausalLM):
        raise TypeError(f"converted must be a FastWeightsForCausalLM, got {describe_value(converted)}")
    _check_source("source", source)
    check_tensor("tokens_BT", tokens_BT, integer=True)
    if tokens_BT.ndim != 2 or tokens_BT.numel() == 0:
        raise ValueError(f"tokens_BT must be [batch, time] with at least one token, got {shape_of(tokens_BT)}")
    if tokens_BT.min() < 0 or tokens_BT.max() >= converted.config.vocab_size:
        raise ValueError(f"tokens_BT must be ids from 0 to {converted.config.vocab_size - 1}, the models' vocabulary")
    if source.config.num_hidden_layers != converted.config.num_hidden_layers:
        raise ValueError(
            f"converted must have the layers of source, {source.config.num_hidden_layers}, "
            f"got {converted.config.num_hidden_layers}"
        )
    conversions = find_conversions(own_config(source.config), own_config(converted.config))
    expected = compute_logits(source, tokens_BT)
    neutral = None
    if all(conversion.neutral is not None for conversion in conversions.values()):
        with _set_to_neutral(converted, conversions):
            neutral = (compute_logits(converted, tokens_BT) - expected).abs().max().item()
    return LogitsCheck(
        tokens=tokens_BT.numel(),
        largest_logit=expected.abs().max().item(),
        neutral=neutral,
        saved=(compute_logits(converted, tokens_BT) - expected).abs().max().item(),
    )


def compute_logits(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in evaluation mode; the model is left in its mode."""
    was_training = model.training
    logits = model.eval()(input_ids=tokens_BT.to(model.device), use_cache=False).logits
    model.train(was_training)
    return logits


@contextmanager
def _set_to_neutral(model: FastWeightsForCausalLM, conversions: Mapping[int, Conversion]) -> Iterator[None]:
    """In the body, the converted layers of the model are at their neutral setting. Afterwards they have their values again."""
    before = []
    for index, conversion in conversions.items():
        layer = model.model.layers[index].mixer
        assert conversion.neutral is not None
        before += [(layer, name, _set_value(layer, name, value)) for name, value in conversion.neutral(layer).items()]
    try:
        yield
    finally:
        for layer, name, value in before:
            _set_value(layer, name, value)
