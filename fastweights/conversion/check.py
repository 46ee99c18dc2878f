"""Does a converted model compute what its source does? Both run on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checks import check_tensor, describe_value, shape_of
from ..kinds import checked
from ..models import FastWeightsForCausalLM
from .convert import check_source, own_config, set_value
from .plan import Conversion, conversions_between

__all__ = ["LogitsCheck", "check_logits"]

LARGEST_ROUNDING = 1e-3  # of the largest logit: far above rounding in float32


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
    check_source("source", source)
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
    conversions = conversions_between(own_config(source.config), own_config(converted.config))
    expected = _compute_logits(source, tokens_BT)
    neutral = None
    if all(conversion.neutral is not None for conversion in conversions.values()):
        with _set_to_neutral(converted, conversions):
            neutral = (_compute_logits(converted, tokens_BT) - expected).abs().max().item()
    return LogitsCheck(
        tokens=tokens_BT.numel(),
        largest_logit=expected.abs().max().item(),
        neutral=neutral,
        saved=(_compute_logits(converted, tokens_BT) - expected).abs().max().item(),
    )


def _compute_logits(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
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
        before += [(layer, name, set_value(layer, name, value)) for name, value in conversion.neutral(layer).items()]
    try:
        yield
    finally:
        for layer, name, value in before:
            set_value(layer, name, value)
