"""What an op is, as data: roles of its inputs, states, outputs, options, backends, and the cases in which it is tested.

From one declaration per op come its checks, head expansion, the quarantine of NaN, its torch.library nodes, contract cases and
benchmark cases. Generated code asks a role, never the name of an argument. Sizes are letters: N sequences, B rows, T tokens,
H key heads, G value heads (each key head serves G/H in a row), K key channels, V value channels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BACKENDS = ("auto", "reference", "torch", "triton")


@dataclass(frozen=True, kw_only=True)
class Role:
    """A tensor with one entry per token. dims: the shapes that it may have after [B, T]; kind: how tests draw it; reaches: how
    far a NaN spreads, to its column of the output or all of its head, now and later, or to the output of its own token."""

    kind: str
    dims: tuple[str, ...]
    dtype: Literal["inputs", "any_float"] = "any_float"
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    minus_inf: bool = False  # -inf is a legal number
    must_be: str = ""  # the limits and the remedy in words, for messages
    remedy: str = ""
    reaches: Literal["head", "column", "token"] = "head"
    scaled: bool = False  # multiplied by the option `scale`


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A tensor without tokens, or a number. dims: the shapes of a tensor; the op receives the last of them."""

    kind: str
    dims: tuple[str, ...]
    above: float = -math.inf
    finite: bool = False
    must_be: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class State:
    """[N, *dims]. by_column: its last dimension is that of the output, which a NaN does not leave; depends_on: the inputs and
    states that a NaN comes from, all but those that reach a token only when None; first: the state before the first token,
    of (sizes, N, dtype, device), zeros when None."""

    dims: str
    by_column: bool = False
    symmetric: bool = False
    depends_on: tuple[str, ...] | None = None
    first: Callable[..., Any] | None = None
    counts: bool = False  # int64, at least 0


@dataclass(frozen=True)
class Output:
    """[B, T, *dims]; depends_on as for a state."""

    dims: str
    depends_on: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Number:
    above: float | None = None
    low: float | None = None
    high: float | None = None
    schema = "float"


@dataclass(frozen=True)
class Scale:
    """The factor on the queries, K^-0.5 when None."""

    schema = "float"


@dataclass(frozen=True, kw_only=True)
class Integer:
    least: int
    most: int = 2**63 - 1
    optional: bool = False

    @property
    def schema(self) -> str:
        return "int?" if self.optional else "int"


@dataclass(frozen=True)
class Flag:
    schema = "bool"


@dataclass(frozen=True)
class Choice:
    values: tuple[str, ...]
    schema = "str"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A form in which an op is tested and timed. given: its optional inputs, and the dims of those that have several; measured:
    options that differ when it is timed; exact_gradient: whether its gradient is that of its values; wide_values: whether it
    needs V >= K."""

    given: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    exact_gradient: bool = True
    wide_values: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """Inputs and options come in the order of the signature. recurrent: the kernel for a few tokens, see few_tokens.py. macs:
    multiply-adds per token and head of the chunkwise form, for (K, V)."""

    name: str
    inputs: Mapping[str, Role | Parameter]
    states: Mapping[str, State]
    outputs: Mapping[str, Output]
    backends: Mapping[str, Any]
    recurrent: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: Mapping[str, Case] = field(default_factory=dict)
    equation: str = ""
    macs: Callable[[int, int], float] | None = None
    parameters: Mapping[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "parameters", {n: role for n, role in self.inputs.items() if isinstance(role, Parameter)}
        )
        for name, backend in self.backends.items():
            backend.bind(self, name)
        if self.recurrent is not None:
            self.recurrent.bind(self)


def spec_of(op: Callable[..., Any]) -> OpSpec:
    """The declaration beside a public op."""
    return next(x for x in vars(sys.modules[op.__module__]).values() if isinstance(x, OpSpec) and x.name == op.__name__)
