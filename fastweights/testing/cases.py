"""The list of ops with what their inputs look like. Contract tests and benchmarks run over every entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops

__all__ = ["CASES", "OpCase", "OpInputs"]


Shape = tuple[int, ...]
Draw = Callable[[Shape, torch.Generator, Mapping[str, Tensor]], Tensor]


def _normal(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _unit(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return F.normalize(_normal(shape, generator, drawn), dim=-1)


def _positive(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return F.elu(_normal(shape, generator, drawn)) + 1.0


def _penalty(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return _unit(shape, generator, drawn) * shape[-1] ** -0.5


def _gate(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return _normal(shape, generator, drawn).sigmoid()


def _decay(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return F.logsigmoid(_normal(shape, generator, drawn) + 2.0)


def _slow_decay(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    """Decays near 1, for rules that forget their prior as well."""
    return 0.1 * _decay(shape, generator, drawn)


def _write_key(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    """The key with every channel scaled by a factor near 1: an unrelated write key would make the memory diverge."""
    return drawn["k"] * torch.exp(0.4 * _normal(shape, generator, drawn).tanh())


def _kept(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return _decay(shape, generator, drawn).exp()


def _ridge(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return 0.25 + F.softplus(_normal(shape, generator, drawn))


def _prior(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return 0.5 + _normal(shape, generator, drawn).sigmoid()


def _center(shape: Shape, generator: torch.Generator, drawn: Mapping[str, Tensor]) -> Tensor:
    return 0.3 * _normal(shape, generator, drawn) - 0.2


# What an input may be: its dimensions (after [B, T] for tokens) and how its numbers are drawn.
# H key heads, G value heads, K key channels, V value channels.
KINDS: dict[str, tuple[str, Draw]] = {
    "query": ("HK", _unit),
    "key": ("HK", _unit),
    "write key": ("HK", _write_key),
    "positive query": ("HK", _positive),
    "positive key": ("HK", _positive),
    "penalty": ("HK", _penalty),
    "value": ("GV", _normal),
    "joint value": ("GV", _unit),  # the rule looks at the whole vector: a channel reaches every other
    "gate": ("G", _gate),
    "kept": ("G", _kept),
    "value gate": ("GV", _gate),
    "decay": ("G", _decay),
    "slow decay": ("G", _slow_decay),
    "channel decay": ("GK", _decay),
}
PARAMETERS: dict[str, tuple[str, Draw]] = {
    "center": ("G", _center),
    "prior": ("G", _prior),
    "ridge": ("GK", _ridge),
}


@dataclass(frozen=True)
class OpInputs:
    """Arguments of one call: tensors with a time dimension, tensors without, and plain keywords."""

    tokens: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {**self.tokens, **self.parameters, **self.options}

    def map(self, f: Callable[[Tensor], Tensor]) -> OpInputs:
        """f applied to every tensor."""
        return replace(
            self,
            tokens={name: f(x) for name, x in self.tokens.items()},
            parameters={name: f(x) for name, x in self.parameters.items()},
        )

    def at(self, index: Any) -> OpInputs:
        """The same call on some of the batch rows and tokens: every token tensor indexed."""
        return replace(self, tokens={name: x[index] for name, x in self.tokens.items()})


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One op in one of its forms. `tokens` and `parameters` give for each tensor argument what it is (KINDS, PARAMETERS);
    `measured` gives the options that differ when the op is timed; `states` names the states in the order of the result;
    `grouped` says whether v may have more heads than q and k; `exact_gradient` that its gradient is that of its values;
    `loosened` is the factor on the tolerances of tests where the rule amplifies rounding; `slots` says that keys may not have
    more channels than values, so that draw widens these."""

    op: Callable[..., Any]
    tokens: Mapping[str, str]
    states: tuple[str, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
    exact_gradient: bool = True
    loosened: float = 1.0
    slots: bool = False

    def tolerance(self, plain: float) -> float:
        return self.loosened * plain

    def draw(
        self,
        *,
        batch: int = 2,
        time: int = 40,
        heads: int = 2,
        value_heads: int | None = None,
        key: int = 8,
        value: int = 6,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> OpInputs:
        """Random inputs of these sizes, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        value = max(key, value) if self.slots else value
        sizes = {"H": heads, "G": heads if value_heads is None else value_heads, "K": key, "V": value}

        def draw_all(
            inputs: Mapping[str, str], kinds: Mapping[str, tuple[str, Draw]], lead: Shape
        ) -> dict[str, Tensor]:
            drawn: dict[str, Tensor] = {}
            for name, kind in inputs.items():
                dims, one = kinds[kind]
                drawn[name] = one((*lead, *(sizes[d] for d in dims)), generator, drawn)
            return {name: x.to(dtype) for name, x in drawn.items()}

        return OpInputs(
            draw_all(self.tokens, KINDS, (batch, time)), draw_all(self.parameters, PARAMETERS, ()), self.options
        )

    def __call__(self, inputs: OpInputs, **keywords: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """o and the final states, always as a tuple."""
        o, state = self.op(**{**inputs.arguments(), "output_final_state": True, **keywords})
        return o, () if state is None else state if isinstance(state, tuple) else (state,)

    def initial_state(self, states: tuple[Tensor, ...]) -> Any:
        """States as the op takes them: a tensor where there is one, a tuple where there are several."""
        return states[0] if len(self.states) == 1 else tuple(states)


@wraps(ops.palimpsa_posterior)
def _mean_and_deviation(*arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
    """The posterior's two results as one output, the variance as a deviation: both then grow with the scale."""
    o, variance, state = ops.palimpsa_posterior(*arguments, **keywords)
    return torch.cat([o, variance.sqrt()], -1), state


PALIMPSA: dict[str, Callable[..., Any]] = {"palimpsa": ops.palimpsa, "palimpsa_posterior": _mean_and_deviation}
QKV = {"q": "query", "k": "key", "v": "value"}
JOINT = {**QKV, "v": "joint value"}
DECAYS = {"none": {}, "head": {"g": "decay"}, "channel": {"g": "channel decay"}}
GRAM = {"precond_g": "decay", "precond_beta": "gate"}

CASES: dict[str, OpCase] = {
    **{
        f"linear_attention-{name}": OpCase(op=ops.linear_attention, tokens={**QKV, **g}, states=("S",))
        for name, g in DECAYS.items()
    },
    **{
        f"delta_rule-{name}{suffix}": OpCase(
            op=ops.delta_rule, tokens={**QKV, "beta": "gate", **g, **write}, states=("S",)
        )
        for name, g in DECAYS.items()
        for suffix, write in {"": {}, "-write": {"write_key": "write key"}}.items()
    },
    "precondition_keys": OpCase(
        op=ops.precondition_keys,
        tokens={"k": "key", "g": "decay", "beta": "gate"},
        parameters={"center": "center"},
        states=("A",),
    ),
    "precondition_queries": OpCase(
        op=ops.precondition_queries,
        tokens={"q": "query", "k": "key", "g": "decay", "beta": "gate"},
        options={"ridge": 0.3},
        states=("A",),
    ),
    **{
        f"preconditioned_delta_rule-{name}": OpCase(
            op=ops.preconditioned_delta_rule,
            tokens={**QKV, "beta": "gate", **g, **GRAM},
            parameters={"center": "center"},
            states=("S", "A"),
        )
        for name, g in DECAYS.items()
    },
    **{
        name: OpCase(
            op=op,
            tokens={**QKV, "beta": "value gate", "g": "decay"},
            parameters={"prior": "prior"},
            states=("M", "J"),
        )
        for name, op in PALIMPSA.items()
    },
    **{
        # The gradient is by implicit differentiation, exact once the iteration has converged. The Chebyshev iteration has
        # not after so few; conjugate gradients must have, as before that they amplify rounding.
        f"gated_kalmanet-{solver}": OpCase(
            op=ops.gated_kalmanet,
            tokens={**QKV, "g": "decay", **mix},
            options={"solver": solver, "iterations": iterations},
            measured={"iterations": 30},
            states=("H", "U"),
            exact_gradient=solver != "chebyshev",
        )
        for solver, iterations, mix in [
            ("chebyshev", 8, {"mix": "gate"}),
            ("conjugate_gradient", 24, {}),
            ("exact", 1, {"mix": "gate"}),
        ]
    },
    "mesa": OpCase(
        op=ops.mesa,
        tokens={**QKV, "g": "decay", "beta": "gate"},
        parameters={"ridge": "ridge"},
        options={"iterations": 16},
        measured={"iterations": 30},
        states=("H", "U"),
    ),
    **{
        f"recursive_least_squares-{name}": OpCase(
            op=ops.recursive_least_squares, tokens={**QKV, "beta": "gate", **g}, states=("S", "P")
        )
        for name, g in {"none": {}, "head": {"g": "slow decay"}}.items()
    },
    **{
        f"variational_linear_attention-{name}": OpCase(
            op=ops.variational_linear_attention,
            tokens={"q": "positive query", "k": "positive key", "v": "value", "u": "penalty"},
            options={"refresh_every": refresh_every},
            states=("S", "A", "z", "count"),
        )
        for name, refresh_every in {"plain": None, "refresh": 20}.items()
    },
    **{
        f"lattice-{objective}{name}": OpCase(
            op=ops.lattice,
            tokens={**JOINT, "gamma": "gate", **kept},
            options={"objective": objective, **options},
            states=("S",),
            slots=True,
        )
        for objective in ("decode", "encode", "similarity")
        for name, kept, options in [
            ("", {}, {}),
            ("-decay", {"decay": "kept"}, {}),
            ("-free", {}, {"normalize": False}),
        ]
    },
    "lattice-decode-l1": OpCase(
        op=ops.lattice, tokens={**JOINT, "gamma": "gate"}, options={"l1": 0.02}, states=("S",), slots=True
    ),
    "output_normalized_ttt": OpCase(op=ops.output_normalized_ttt, tokens={**JOINT, "gamma": "gate"}, states=("S",)),
}
