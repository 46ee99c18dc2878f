"""Which mixer continues as which: the parameters that carry over, those that are new, and the setting at which both compute the
same. And the plan of one model: per layer its conversion, and the options of its new mixer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checks import closest, describe_value
from ..kinds import checked
from ..layers import MIXERS, Mixer
from ..layers.preconditioner import SIDES
from ..models import FastWeightsConfig

__all__ = ["CONVERSIONS", "Conversion", "condition", "find_conversions", "converted_config"]

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
        new=("importance.", "skip.", "threshold.", "variance."),
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
        neutral=_plain_sides,
        equality="at bound 1, where the write key is the key (with the source's largest beta, and a large ridge for queries)",
        first_values="gates and centre of the preconditioner as in a new layer",
    )


def _large_ridge(layer: Mixer) -> dict[str, float]:
    norm: Any = layer.get_submodule("output").norm
    if norm is None:
        raise ValueError(
            "output_norm must be True where queries are preconditioned, got False: the norm cancels the ridge"
        )
    return {"ridge": LARGE_RIDGE, "output.norm.eps": norm.eps / LARGE_RIDGE**2}


def _plain_sides(layer: Mixer) -> dict[str, float]:
    """Where a preconditioned delta rule computes what it does without a preconditioner: as `_key_side` and `_query_side` say."""
    options: Any = layer.options
    sides = SIDES[options.preconditioner]
    keys = {"preconditioner.bound": 1.0, "preconditioner.factor": 1.0} if "key" in sides else {}
    beta = {"gain.largest": 2.0} if options.negative_eigenvalues else {}
    return {**keys, **beta, **(_large_ridge(layer) if "query" in sides else {})}


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


def _same(mixer: str) -> Conversion:
    """A model of another library in the form of this one."""
    return Conversion(
        source=mixer,
        target=mixer,
        neutral=lambda layer: {},
        equality="everywhere: the same model in this library's form",
        first_values="nothing is new",
    )


GATED_LINEAR = {"decay": "head", "feature_map": "identity", "preconditioner": None}

_ALL = (
    _same("mamba2"),
    _same("gdn"),
    _same("deltanet"),
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


def converted_config(config: FastWeightsConfig, to: str, options: Mapping[str, Any]) -> FastWeightsConfig:
    """The configuration with every layer that continues as `to` changed into it, and the others as they were.

    Raises:
        ValueError: no layer continues as `to`, or an option cannot be carried over.
    """
    if "name" in options:
        raise ValueError(f"{to} has no option 'name'; the mixer is named by `to`")
    layers = config.mixers()
    found = [_find_conversion(name, own, to) for name, own in layers]
    if not any(found):
        raise ValueError(_explain_none([name for name, _ in layers], to))
    entries: list[Any] = []
    for index, ((name, own), conversion) in enumerate(zip(layers, found, strict=True)):
        new = own
        if conversion is not None:
            try:
                new = {**_carry_options(conversion, own), **conversion.options, **options}
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None
            name = to
        entries.append({"name": name, **new} if new else name)
    others = [entry for layer, entry in enumerate(entries) if layer not in config.softmax_layers]
    same = all(entry == others[0] for entry in others)
    layout = () if same else ("softmax_layers", "softmax_options")
    changed = config.to_dict()
    for key in ("mixer", *layout, "architectures", "transformers_version", "dtype"):
        changed.pop(key, None)
    unknown = {key: changed.pop(key) for key in FastWeightsConfig.unknown_keys(list(changed))}
    converted = FastWeightsConfig(**changed, mixer=others[0] if same else entries)
    converted.update(unknown)
    return converted


def find_conversions(before: FastWeightsConfig, after: FastWeightsConfig) -> dict[int, Conversion]:
    """The conversion of every layer that was converted, by index."""
    conversions = {}
    for index, (old, new) in enumerate(zip(before.mixers(), after.mixers(), strict=True)):
        conversion = CONVERSIONS.get((old[0], new[0]))
        if conversion is not None and (old != new or not conversion.new):
            conversions[index] = conversion
    return conversions


@checked
def condition(conversion: Conversion) -> str:
    """The options that a source needs and that its mixer has not by default, such as "decay='head'"; empty where there are
    none."""
    usual = _list_options(conversion.source)
    needed = {name: value for name, value in conversion.requires.items() if usual[name] != value}
    return " and ".join(f"{name}={value!r}" for name, value in needed.items())


def _find_conversion(name: str, options: Mapping[str, Any], to: str) -> Conversion | None:
    """The conversion of one layer, None where there is none or where it has what the conversion adds."""
    conversion = CONVERSIONS.get((name, to))
    if conversion is None or name != to:
        return conversion
    present = {**_list_options(name), **options}
    return conversion if all(present[key] == value for key, value in conversion.requires.items()) else None


def _carry_options(conversion: Conversion, options: Mapping[str, Any]) -> dict[str, Any]:
    """The source's options as those of the target, without those that are the target's defaults."""
    defaults = _list_defaults(MIXERS[conversion.source].layer)
    known = _list_options(conversion.target)
    carried = {}
    for option, value in {**_list_options(conversion.source), **options}.items():
        if option in conversion.requires:
            if value != conversion.requires[option]:
                raise ValueError(
                    f"{conversion.source} with {option}={value!r} cannot continue as {conversion.target}: "
                    f"{option} must be {conversion.requires[option]!r}"
                )
        elif option in known:
            # A source without a part leaves the first values of that part to a target that always has it.
            if value != known[option] and (value is not None or _takes_none(conversion.target, option)):
                carried[option] = value
        elif value != defaults[option]:
            raise ValueError(
                f"{conversion.source} with {option}={value!r} cannot continue as {conversion.target}, which has no such "
                f"option: {option} must be {defaults[option]!r}"
            )
    return carried


def _takes_none(name: str, option: str) -> bool:
    """Whether None is a value of the option of a named mixer."""
    return "None" in str(inspect.signature(MIXERS[name].layer).parameters[option].annotation)


def _list_options(name: str) -> dict[str, Any]:
    """All options of a named mixer and their values."""
    return {**_list_defaults(MIXERS[name].layer), **MIXERS[name].options}


def _list_defaults(layer: type) -> dict[str, Any]:
    parameters = inspect.signature(layer).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _explain_none(names: list[str], to: str) -> str:
    if (to, to) in CONVERSIONS and to in names:
        return (
            f"there is no conversion from {to} to itself but for layers with {condition(CONVERSIONS[to, to])}: these layers have "
            "what it would add"
        )
    targets = [target for _, target in CONVERSIONS]
    hint = "" if to in targets else closest(to, targets)
    needed = {pair: condition(conversion) for pair, conversion in CONVERSIONS.items()}
    pairs = ", ".join(f"{old}{f' with {text}' * bool(text)} -> {new}" for (old, new), text in needed.items())
    have = ", ".join(dict.fromkeys(names))
    return (
        f"to must be a mixer that {have} continues as, and there is no conversion from {have} to {describe_value(to)}{hint}; "
        f"there are {pairs}"
    )
