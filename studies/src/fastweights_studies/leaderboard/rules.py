"""The memory rules with fixed gates, as functions of a stream: what a layer's gates would be is a number of one grid for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastweights.checks import check_choice, check_number, check_text, check_texts, describe_value
from fastweights.kinds import checked
from fastweights.ops import (
    delta_rule,
    elementwise_longhorn,
    gated_kalmanet,
    lattice,
    linear_attention,
    mesa,
    output_normalized_ttt,
    palimpsa,
    precondition_keys,
    precondition_queries,
    preconditioned_delta_rule,
    recursive_least_squares,
    variational_linear_attention,
)
from fastweights.plugins import note_registration

from .streams import Stream

__all__ = ["GRID", "LEFT_OUT", "RULES", "SAME_RULE", "Gates", "Rule", "RuleInputs", "known_rules", "register_rule"]

# What a gate may be. Every rule gets the best of these for the gates that it has.
GRID: dict[str, tuple[float, ...]] = {
    "decay": (1.0, 0.98, 0.9, 0.7),
    "gain": (1.0, 0.5, 0.2, 0.05),
    "ridge": (0.01, 0.1, 1.0),
}
# Numbers of the layers that training would change and that no gate of the grid is: the values that the layers begin with.
CENTER, BOUND = -0.2, 1.5  # of the preconditioned write keys
FEEDBACK, CORRECTION = 1 / (1 + math.exp(-1)), 0.02  # of Comba


@checked
@dataclass(frozen=True, kw_only=True)
class Gates:
    """Fixed gates. A rule reads those that it has.

    Attributes:
        decay: of the memory from one token to the next, above 0 and at most 1.
        gain: of a write, at least 0.
        ridge: of a regression, above 0.

    Raises:
        TypeError: a gate that is not a number.
        ValueError: a number outside these limits.
    """

    decay: float = 1.0
    gain: float = 1.0
    ridge: float = 1.0

    def __post_init__(self) -> None:
        check_number("decay", self.decay, above=0, high=1)
        check_number("gain", self.gain, low=0)
        check_number("ridge", self.ridge, above=0)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A memory rule without training.

    Attributes:
        mixer: in the registry, which has the rule. options: those with which it has it.
        gates: the gates that it has, of `GRID`.
        state: numbers per head, of d key and d value channels.
        answers: the answers [B, T, d] to the queries of a stream.
    """

    mixer: str
    options: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...]
    state: Callable[[int], int]
    answers: Callable[[Stream, Gates], Tensor]

    @property
    def name(self) -> str:
        """As tables and commands say it."""
        return " ".join([self.mixer, *self.options.values()])

    def choices(self) -> Iterator[Gates]:
        """Every choice of its gates in the grid."""
        for values in itertools.product(*(GRID[name] for name in self.gates)):
            yield Gates(**dict(zip(self.gates, values, strict=True)))


@checked
class RuleInputs:
    """A stream with one head, and gates as tensors: the arguments of an op.

    Attributes:
        q, k, v: [B, T, 1, d], float64. Keys have unit length.
        g: log of the decay [B, T, 1]. beta: the gain [B, T, 1]. one: ones [B, T, 1].
    """

    def __init__(self, stream: Stream, gates: Gates) -> None:
        self.q, self.k, self.v = (x[:, :, None] for x in (stream.q, stream.k, stream.v))
        self.g = torch.full(self.k.shape[:3], math.log(gates.decay), dtype=self.k.dtype)
        self.beta = torch.full_like(self.g, gates.gain)
        self.one = torch.ones_like(self.g)


RuleFunction = Callable[[RuleInputs, Gates], Tensor]


def _answers(name: str, rule: RuleFunction) -> Callable[[Stream, Gates], Tensor]:
    def answers(stream: Stream, gates: Gates) -> Tensor:
        inputs = RuleInputs(stream, gates)
        found = rule(inputs, gates)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"rule {name!r} must return the answers alone, as a tensor, got {describe_value(found)}; of what an op returns "
                "they are the first"
            )
        if found.shape != inputs.v.shape:
            wanted, got = list(inputs.v.shape), list(found.shape)
            raise ValueError(f"rule {name!r} must return answers of the shape of v, {wanted}, got {got}")
        return found[:, :, 0]

    return answers


def _linear(x: RuleInputs, gates: Gates) -> Tensor:
    return linear_attention(x.q, x.k, x.v, x.g, scale=1.0)[0]


def _divided_queries(x: RuleInputs, gates: Gates) -> Tensor:
    q, _ = precondition_queries(x.q, x.k, x.g, x.one, ridge=gates.ridge)
    return linear_attention(q, x.k, x.v, x.g, scale=1.0)[0]


def _linear_by_write_keys(x: RuleInputs, gates: Gates) -> Tensor:
    w, _ = precondition_keys(x.k, x.g, x.one, CENTER, bound=BOUND)
    return linear_attention(x.q, w, x.v, x.g, scale=1.0)[0]


def _delta(x: RuleInputs, gates: Gates) -> Tensor:
    return delta_rule(x.q, x.k, x.v, x.beta, x.g, scale=1.0)[0]


def _preconditioned_delta(x: RuleInputs, gates: Gates) -> Tensor:
    return preconditioned_delta_rule(
        x.q, x.k, x.v, x.beta, x.g, precond_g=x.g, precond_beta=x.one, center=CENTER, bound=BOUND, scale=1.0
    )[0]


def _longhorn(x: RuleInputs, gates: Gates) -> Tensor:
    return delta_rule(x.q, x.k, x.v, x.beta / (1 + x.beta), scale=1.0)[0]


def _longhorn_by_element(x: RuleInputs, gates: Gates) -> Tensor:
    return elementwise_longhorn(x.q, x.k, x.v, x.beta[..., None].expand_as(x.v), scale=1.0)[0]


def _efla(x: RuleInputs, gates: Gates) -> Tensor:
    return delta_rule(x.q, x.k, x.v, -torch.expm1(-x.beta), scale=1.0)[0]


def _comba(x: RuleInputs, gates: Gates) -> Tensor:
    read = FEEDBACK / gates.decay * x.k
    return delta_rule(x.q - CORRECTION * x.k, read, x.v, x.beta, x.g, write_key=x.k, scale=1.0)[0]


def _printed_delta(x: RuleInputs, gates: Gates) -> Tensor:
    return delta_rule(x.q, x.k / gates.decay, x.v, x.one, x.g, write_key=x.k, scale=1.0)[0]


def _palimpsa(x: RuleInputs, gates: Gates) -> Tensor:
    beta = x.beta[..., None].expand_as(x.v)
    return palimpsa(x.q, x.k, beta * x.v, beta, x.g, prior=gates.ridge, scale=1.0)[0]


def _kalmanet(x: RuleInputs, gates: Gates) -> Tensor:
    return gated_kalmanet(x.q, x.k, x.v, x.g, ridge=gates.ridge, solver="exact", scale=1.0)[0]


def _mesa(x: RuleInputs, gates: Gates) -> Tensor:
    return mesa(x.q, x.k, x.v, x.g, x.one, gates.ridge, iterations=2 * x.k.shape[-1], scale=1.0)[0]


def _least_squares(x: RuleInputs, gates: Gates) -> Tensor:
    g = None if gates.decay == 1 else x.g
    return recursive_least_squares(x.q, x.k, x.v, x.one, g, ridge=gates.ridge, scale=1.0)[0]


def _lattice(objective: str) -> Callable[[RuleInputs, Gates], Tensor]:
    def rule(x: RuleInputs, gates: Gates) -> Tensor:
        v = torch.nn.functional.normalize(x.v, dim=-1)
        return lattice(x.q, x.k, v, x.beta, objective=objective, decay=x.g.exp())[0]

    return rule


def _ttt(x: RuleInputs, gates: Gates) -> Tensor:
    return output_normalized_ttt(x.q, x.k, torch.nn.functional.normalize(x.v, dim=-1), x.beta)[0]


def _variational(x: RuleInputs, gates: Gates) -> Tensor:
    """S^T q: the divisor z.q, which serves positive keys alone, is multiplied back."""
    eps, size = 1e-4, x.k.shape[-1]
    o, _ = variational_linear_attention(x.q, x.k, x.v, x.k * size**-0.5, ridge=gates.ridge, eps=eps)
    return o * (x.k.cumsum(1) * x.q).sum(-1, keepdim=True).clamp_min(eps)


def _matrix(d: int) -> int:
    return d * d


def _matrix_and_energy(d: int) -> int:
    return d * (d + 1)


def _two_matrices(d: int) -> int:
    return 2 * d * d


def _rule(mixer: str, gates: Sequence[str], state: Callable[[int], int], rule: RuleFunction, **options: str) -> Rule:
    return Rule(mixer=mixer, options=options, gates=tuple(gates), state=state, answers=_answers(mixer, rule))


RULES = {
    rule.name: rule
    for rule in (
        _rule("linear", (), _matrix, _linear),
        _rule("gla", ("decay",), _matrix, _linear),
        _rule("pla", ("ridge",), _matrix_and_energy, _divided_queries),
        _rule("pgla", ("decay", "ridge"), _matrix_and_energy, _divided_queries),
        _rule("pmamba2-key", ("decay",), _matrix_and_energy, _linear_by_write_keys),
        _rule("deltanet", ("gain",), _matrix, _delta),
        _rule("gdn", ("gain", "decay"), _matrix, _delta),
        _rule("pdn", ("gain",), _matrix_and_energy, _preconditioned_delta),
        _rule("pgdn", ("gain", "decay"), _matrix_and_energy, _preconditioned_delta),
        _rule("longhorn", ("gain",), _matrix, _longhorn),
        _rule("longhorn-elementwise", ("gain",), _matrix, _longhorn_by_element),
        _rule("efla", ("gain",), _matrix, _efla),
        _rule("nlms", (), _matrix, _delta),
        _rule("comba", ("gain", "decay"), _matrix, _comba),
        _rule("palimpsa-d", ("gain", "decay", "ridge"), _two_matrices, _palimpsa),
        _rule("gka", ("decay", "ridge"), _two_matrices, _kalmanet),
        _rule("mesa", ("decay", "ridge"), _two_matrices, _mesa),
        _rule("lattice", ("gain", "decay"), _matrix, _lattice("decode")),
        _rule("lattice", ("gain", "decay"), _matrix, _lattice("encode"), objective="encode"),
        _rule("lattice", ("gain", "decay"), _matrix, _lattice("similarity"), objective="similarity"),
        _rule("ttt", ("gain",), _matrix, _ttt),
        _rule("vla", ("ridge",), lambda d: d * (2 * d + 1), _variational),
        _rule("vla-deltanet", ("decay",), _matrix, _printed_delta),
        _rule("rls", ("decay", "ridge"), _two_matrices, _least_squares),
    )
}
_REGISTERED: dict[str, Rule] = {}
# Mixers that have the rule of another one where gates are fixed and equal for all channels.
SAME_RULE = {
    "retnet": "gla", "mamba2": "gla", "pmamba2": "pgla", "pmamba2-tied": "pgla", "kda": "gdn", "pkda": "pgdn",
    "palimpsa-m": "palimpsa-d", "vla-conv": "vla",
}  # fmt: skip
LEFT_OUT = {
    "deltaproduct": "takes several keys per token, and these streams have one",
    "gated-deltaproduct": "takes several keys per token, and these streams have one",
    "rwkv7": "erases along keys of its own, and these streams have none",
    "softmax": "keeps every token: no memory of fixed size",
    "vla-softmax": "keeps every token: no memory of fixed size",
    "vla-linear": "is `linear` with a divisor for positive keys, and these streams have keys of both signs",
}


def known_rules() -> dict[str, Rule]:
    """The rules of the library and those that were registered, by name."""
    return {**RULES, **_REGISTERED}


def register_rule(
    name: str, *, gates: Sequence[str], state: Callable[[int], int]
) -> Callable[[RuleFunction], RuleFunction]:
    """Declare the rule of a mixer for the comparison without training; a decorator of the function that computes it.

    The function gets a `RuleInputs` and the `Gates` of the grid, and returns answers [B, T, 1, d] for its queries. In a notebook
    a rule that is declared again takes its own place.

    Args:
        name: of the mixer, which `fastweights leaderboard rules --mixers NAME` names.
        gates: the gates that it reads, of "decay", "gain" and "ridge"; each takes the values of one grid for all rules.
        state: numbers that the memory of one head holds, of d key and d value channels.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a name of the library, or an unknown gate.
    """
    check_text("name", name, what="the name of a mixer", empty=False)
    if name in {*RULES, *SAME_RULE, *LEFT_OUT}:
        raise ValueError(f"name must not be that of a mixer of the library, got {name!r}; choose another name")
    for gate in check_texts("gates", gates, what="names of gates"):
        check_choice("gates", gate, GRID)
    if not callable(state):
        raise TypeError(f"state must be a function of d that gives numbers per head, got {describe_value(state)}")

    def register(rule: RuleFunction) -> RuleFunction:
        _REGISTERED[name] = _rule(name, gates, state, rule)
        note_registration()
        return rule

    return register
