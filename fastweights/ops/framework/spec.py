"""What an op is, as data: roles of its inputs, states, outputs, options, backends, and the cases in which it is tested.

From one declaration per op come its checks, head expansion, the quarantine of NaN, its torch.library nodes, contract cases and
benchmark cases. Generated code asks a role, never the name of an argument. Sizes are letters: N sequences, B rows, T tokens,
H key heads, G value heads (each key head serves G/H in a row), K key channels, V value channels, R steps per token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any, Literal

from .passing import Passing

BACKENDS = ("auto", "reference", "torch", "triton")


@dataclass(frozen=True, kw_only=True)
class Role:
    """A tensor with one entry per token.

    Attributes:
        kind: how tests draw its numbers.
        dims: the shapes that it may have after [B, T].
        dtype: "inputs" where it must have the dtype of the other inputs.
        optional: whether it may be None.
        low, high: limits of its numbers.
        minus_inf: whether -inf is a legal number.
        must_be, remedy: the limits in words, and what to pass instead, for messages.
        reaches: which results a NaN in it makes NaN: its own column of the output ("column") or all columns of its head
            ("head"), both from its token on; or the output of its own token alone ("token").
        scaled: whether it is multiplied by the option `scale`.
    """

    kind: str
    dims: tuple[str, ...]
    dtype: Literal["inputs", "any_float"] = "any_float"
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    minus_inf: bool = False
    must_be: str = ""
    remedy: str = ""
    reaches: Literal["head", "column", "token"] = "head"
    scaled: bool = False


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
    """A tensor [N, *dims] that one call leaves for the next.

    Attributes:
        dims: its shape after the sequences.
        by_column: whether a NaN stays in its column, the last dimension, which is that of the output. Otherwise one NaN makes
            the state of the whole head NaN.
        symmetric: whether it is a symmetric matrix.
        depends_on: the inputs and states whose NaN reach it. None means all, except inputs that reach the output of their own
            token alone.
        first: function of (sizes, N, dtype, device) that makes the state before the first token; zeros when None.
        begins: that state in words, for docstrings.
        counts: whether it is a number of tokens, int64 and at least 0, rather than numbers of the memory.
    """

    dims: str
    by_column: bool = False
    symmetric: bool = False
    depends_on: tuple[str, ...] | None = None
    first: Callable[..., Any] | None = None
    begins: str = "zeros"
    counts: bool = False

    def count_numbers(self, heads: int, key: int, value: int) -> int:
        """Numbers per sequence. A number of tokens does not count: it is no memory."""
        sizes = {"G": heads, "H": heads, "K": key, "V": value}
        return 0 if self.counts else math.prod(sizes[size] for size in self.dims)


@dataclass(frozen=True)
class Output:
    """[B, T, *dims]; depends_on as for a state."""

    dims: str
    depends_on: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number more than `above`, at least `low`, at most `high`; a limit of None is none."""

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
    """A whole number from `least` to `most`, or None where it is optional."""

    least: int
    most: int = 2**63 - 1
    optional: bool = False

    @property
    def schema(self) -> str:
        return "int?" if self.optional else "int"


@dataclass(frozen=True)
class Flag:
    """True or False."""

    schema = "bool"


@dataclass(frozen=True)
class Choice:
    """One of some words."""

    values: tuple[str, ...]
    schema = "str"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A form in which an op is tested and timed.

    Attributes:
        given: the optional inputs that it has, and the dims of those that may have several.
        options: options that differ from their defaults.
        measured: options that differ when it is timed.
        exact_gradient: whether the gradient is that of the computed values, and not an approximation.
        wide_values: whether it needs V >= K.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    exact_gradient: bool = True
    wide_values: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """The declaration of an op.

    Attributes:
        name: of the op, of letters, digits and "_".
        inputs, options: in the order of the signature.
        states, outputs: in the order in which the op returns them.
        backends: "reference" and "torch", and "triton" where there are kernels.
        recurrent: the kernel for a few tokens, see `recurrent`.
        cases: the forms in which the op is tested, by name; "" is the form that has the name of the op alone.
        equation: the update and the answer, in plain text.
        macs: function of (K, V): multiply-adds of the chunkwise form per token and head.
        passing: how its states pass from one part of a sequence to the next, where that is affine.
    """

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
    passing: Passing | None = None
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
    """The declaration of an op.

    Raises:
        TypeError: it has none.
    """
    spec = getattr(op, "spec", None)
    if not isinstance(spec, OpSpec):
        name = getattr(op, "__name__", type(op).__name__)
        raise TypeError(f"op must be an op with a declaration, got {name}; put @op(SPEC) over its definition")
    return spec


def count_numbers(states: Iterable[State], heads: int, key: int, value: int) -> int:
    """Numbers per sequence of some states, for so many value heads, key channels and value channels."""
    return sum(state.count_numbers(heads, key, value) for state in states)


def format_numbers(states: Iterable[State]) -> str:
    """What `count_numbers` computes, in letters: "H K (V + 1)" for a matrix and a vector per head, H heads of K key and V value
    channels."""
    terms = Counter(state.dims.replace("G", "H") for state in states if not state.counts)
    shared = reduce(and_, (Counter(sizes) for sizes in terms))
    rest = {"".join((Counter(sizes) - shared).elements()): count for sizes, count in terms.items()}
    summands = [
        " ".join([*([str(count)] if count > 1 or not sizes else []), *sizes])
        for sizes, count in sorted(rest.items(), key=lambda term: ("VK".find(term[0]) if term[0] else 9, term[0]))
    ]
    factors = " ".join(sorted(shared.elements(), key="HKV".index))
    if len(summands) > 1:
        return f"{factors} ({' + '.join(summands)})"
    return " ".join([*(summands if summands != ["1"] else []), factors])
