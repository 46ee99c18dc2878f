"""Models of equal state and equal parameters: the head size of a memory and the width of the MLP are chosen for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fastweights.layers import MIXERS, MixerChoice
from fastweights.models import FastWeightsConfig

from ..record import Plain
from .entries import describe_label

__all__ = ["REFERENCE", "Matched", "Matching"]

# A memory of H K V numbers per layer, K = V. Its model with the usual MLP has the parameters of all.
REFERENCE = "linear"
Build = Callable[[FastWeightsConfig], Any]


@dataclass(frozen=True)
class Matched:
    """A mixer in the size in which it takes part.

    Attributes:
        choice: with the head size that was found.
        intermediate_size: of the MLP.
        parameters: of the whole model. state: numbers per sequence after one token, over all layers.
        grows: whether the state grows with the tokens, so that it was not made equal.
        given: the options that were chosen for it, without a head size that was found.
    """

    choice: MixerChoice
    intermediate_size: int
    parameters: int
    state: int
    grows: bool
    given: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Plain]:
        """What the rows of its trainings say of its size."""
        head = {"head_dim": self.choice.options["head_dim"]} if "head_dim" in self.choice.options else {}
        return {
            **describe_label(MixerChoice(self.choice.name, self.given, self.choice.label)),
            **head,
            "intermediate_size": self.intermediate_size,
            "parameters": self.parameters,
            "state": self.state,
            "grows": self.grows,
        }


@dataclass(frozen=True)
class Matching:
    """What is equal for all mixers of a comparison.

    The head size is the largest whose state is not above that of the reference, or by a small share; then the MLP is as wide as
    brings the parameters nearest to the reference's. A mixer that keeps every token has the reference's head size; one without
    the option head_dim, or with a head_dim that was chosen for it, keeps its own.

    Attributes:
        model: fields of `FastWeightsConfig` but mixer and intermediate_size.
        head_dim: of the reference.
        build: a model of a configuration, with `num_parameters` and `state_size`.
        excess: the share of the reference's state by which a state may be above it.
        multiple: of which the widths of the MLP and of all heads together are multiples.
    """

    model: Mapping[str, Any]
    head_dim: int
    build: Build
    excess: float = 0.0
    multiple: int = 1

    def of(self, choice: MixerChoice) -> Matched:
        """The mixer in the size in which it takes part."""
        reference = self._sized(MixerChoice(REFERENCE, {"head_dim": self.head_dim}), None)
        most = int(reference.state * (1 + self.excess))
        fitting = next((one for one in self._candidates(choice) if one.grows or one.state <= most), None)
        if fitting is None:
            raise ValueError(
                f"mixer {choice.label} has no head size with at most {most:,} numbers of state; leave it out"
            )
        return replace(self._with_parameters(fitting, reference.parameters), given=choice.options)

    def _candidates(self, choice: MixerChoice) -> Iterator[Matched]:
        """The mixer with the head sizes that it may have, the largest first. Sizes that its layer refuses are left out."""
        if "head_dim" in choice.options or not _has_head_dim(choice.name):
            sized = self._sized(choice, None)
            yield Matched(sized.choice, sized.intermediate_size, sized.parameters, 0, sized.grows)
            return
        step = self.multiple // math.gcd(self.multiple, self.model["num_heads"])
        for size in range(self.head_dim - self.head_dim % step, 0, -step):
            try:
                yield self._sized(MixerChoice(choice.name, {**choice.options, "head_dim": size}, choice.label), None)
            except ValueError:
                if size == step:
                    raise

    def _with_parameters(self, mixer: Matched, wanted: int) -> Matched:
        """The mixer with the MLP that brings its parameters nearest to `wanted`."""
        here = self._sized(mixer.choice, mixer.intermediate_size)
        slope = self._sized(mixer.choice, mixer.intermediate_size + 1).parameters - here.parameters
        steps = round((wanted - here.parameters) / slope / self.multiple)  # from the default width, a multiple of 64
        return self._sized(mixer.choice, max(self.multiple, mixer.intermediate_size + steps * self.multiple))

    def _sized(self, choice: MixerChoice, intermediate_size: int | None) -> Matched:
        config = FastWeightsConfig(**self.model, mixer=choice.entry, intermediate_size=intermediate_size)
        with torch.device("meta"):
            model = self.build(config)
        state = model.state_size(1)
        width = config.intermediate_size or 0
        return Matched(choice, width, model.num_parameters(), state, state != model.state_size(2))


def _has_head_dim(name: str) -> bool:
    options = getattr(MIXERS[name].layer, "Options", None)
    return options is not None and "head_dim" in {field.name for field in fields(options)}
