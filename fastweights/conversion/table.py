"""Which mixer continues as which: what carries over, what is new, and where the two compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..kinds import checked
from ..layers import Mixer

__all__ = ["CONVERSIONS", "Conversion"]

LARGE_RIDGE = 1e8  # above any key energy by more than float32 resolves


@checked
@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How a trained mixer continues as another. Source and target are names of `fastweights.layers.MIXERS`.

    Attributes:
        requires: options of the source that the target takes for granted, with the values they must have.
        options: of the target, instead of its own defaults.
        new: beginnings of the names of the parameters that the target adds.
        start: first values of new parameters that are not those of a new layer.
        neutral: given a target layer, the attributes (dotted names) and values at which it computes what the source does;
            None where there are none.
        equality: the neutral setting in words, or why there is none.
        first_values: what the new parameters start from, in words.
    """

    source: str
    target: str
    requires: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    start: Mapping[str, float] = field(default_factory=dict)
    neutral: Callable[[Mixer], Mapping[str, float]] | None
    equality: str
    first_values: str


def _metaplastic(source: str, target: str, requires: Mapping[str, Any]) -> Conversion:
    """With importances of nothing but the prior Palimpsa is gated linear attention (Palimpsa, section 2.4). Each head draws its
    first b_scale from the paper's range for models that are trained on, [0.1, 1], as its released code does. D, where the
    source has none, starts at 0."""
    return Conversion(
        source=source,
        target=target,
        requires=requires,
        options={"b_scale": [0.1, 1.0]},
        new=("importance.", "skip."),
        start={"skip.D": 0.0},
        neutral=lambda layer: {"importance.b_scale": -math.inf},
        equality="at metaplasticity scale 0 (b_scale = -inf), where every importance is the prior",
        first_values="b_scale drawn from [0.1, 1] unless given (lower is nearer the source), the projection of beta as in a new "
        "layer, D 0 where the source has none",
    )


def _key_side(source: str, target: str) -> Conversion:
    """The write key of a preconditioned DeltaNet is k when its factors have bound x = 1, in whichever interval. The centre
    starts as in a new layer: nearer to log A the factors would be closer to 1 on average, but differ more between channels."""
    return Conversion(
        source=source,
        target=target,
        requires={"preconditioner": None},
        new=("preconditioner.",),
        neutral=lambda layer: {"preconditioner.bound": 1.0, "preconditioner.factor": 1.0},
        equality="at bound 1, where the write key is the key",
        first_values="gates and centre of the preconditioner as in a new layer",
    )


def _large_ridge(layer: Mixer) -> dict[str, float]:
    norm: Any = layer.get_submodule("output.norm")
    return {"ridge": LARGE_RIDGE, "output.norm.eps": norm.eps / LARGE_RIDGE**2}


def _query_side(source: str, target: str) -> Conversion:
    """q / (A + ridge) is q / ridge for a ridge far above A. The norm over each head, with epsilon scaled too, cancels that."""
    return Conversion(
        source=source,
        target=target,
        requires={"preconditioner": None, "output_norm": True},
        new=("preconditioner.",),
        neutral=_large_ridge,
        equality="only as the ridge goes to infinity, where q / (A + ridge) is q / ridge and the norm over each head cancels it",
        first_values="gates of the preconditioner as in a new layer",
    )


GATED_LINEAR = {"decay": "head", "feature_map": "identity", "preconditioner": None}

_ALL = (
    Conversion(
        source="mamba2",
        target="mamba2",
        neutral=lambda layer: {},
        equality="everywhere: the same model in this library's form",
        first_values="nothing is new",
    ),
    _metaplastic("mamba2", "palimpsa-m", {"metaplasticity": False}),
    _metaplastic("palimpsa-m", "palimpsa-m", {"metaplasticity": False}),
    _metaplastic("linear", "palimpsa-d", GATED_LINEAR),
    _metaplastic("gla", "palimpsa-d", GATED_LINEAR),
    _metaplastic("pmamba2", "palimpsa-d", GATED_LINEAR),
    _metaplastic("palimpsa-d", "palimpsa-d", {"metaplasticity": False}),
    _key_side("deltanet", "pdn"),
    _key_side("gdn", "pgdn"),
    _key_side("kda", "pkda"),
    _query_side("linear", "pla"),
    _query_side("gla", "pgla"),
    Conversion(
        source="gdn",
        target="gka",
        requires={"decay": "head", "gain": "beta", "negative_eigenvalues": False, "preconditioner": None},
        new=("mix.", "gain.b_proj.bias", "sketch."),
        neutral=None,
        equality="nowhere: gdn corrects its memory as it writes, gka solves for all that it has kept as it reads",
        first_values="projection of the alpha connection as in a new layer",
    ),
)

CONVERSIONS: dict[tuple[str, str], Conversion] = {(c.source, c.target): c for c in _ALL}
