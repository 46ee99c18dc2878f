"""An op on a sequence that is divided over processes, by exchanging heads: each process runs it on some heads and all tokens.

The declaration says where the heads of a tensor are, so a rule needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..framework.checks import Sizes, as_tuple
from ..framework.in_torch import expand_heads
from ..framework.spec import OpSpec
from .exchange import gather_heads, take_heads, to_heads, to_tokens
from .group import ContextParallel

__all__ = ["Divided", "choose_units", "run_on_heads"]


class Divided(NamedTuple):
    """Stands in the place of an initial state where the tokens are divided over processes."""

    initial_state: Any
    cp: ContextParallel


def choose_units(spec: OpSpec, sizes: Sizes, ranks: int) -> int:
    """How many units of heads the ranks share: the key heads with their value heads. Key heads are repeated, as often as makes the
    shares equal where that is possible, else once per value head."""
    repeats = [n for n in range(1, sizes.G // sizes.H + 1) if sizes.G // sizes.H % n == 0]
    return sizes.H * next((n for n in repeats if sizes.H * n % ranks == 0), repeats[-1])


def run_on_heads(
    call: Callable[..., tuple[Any, Any]],
    spec: OpSpec,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    given: Divided,
    final: bool,
    cu_seqlens: Tensor | None,
    backend: str,
    sizes: Sizes,
) -> tuple[Any, Any]:
    """What call(spec, inputs, options, initial state, final, cu_seqlens, backend) returns, for arguments that passed the checks."""
    cp = given.cp
    units = choose_units(spec, sizes, cp.size)
    if units < cp.size:
        raise ValueError(
            f"cp_group must have at most as many processes as there are value heads, {sizes.G}, got {cp.size}; use more heads or "
            "fewer processes"
        )
    named = dict(zip(spec.inputs, inputs))
    tokens = {name: x for name, x in named.items() if name not in spec.parameters and x is not None}
    wide = [expand_heads(x, units) if x.shape[2] < units else x for x in tokens.values()]
    named |= dict(zip(tokens, to_heads(wide, units, cp)))
    for name, role in spec.parameters.items():
        named[name] = take_parameter(named[name], units, cp)
    before = given.initial_state
    if before is not None:
        declared = zip(as_tuple(before), spec.states.values())
        before = tuple(x if not state.dims else take_heads(x, 1, units, cp) for x, state in declared)
    o, after = call(spec, tuple(named.values()), options, before, final, cu_seqlens, backend)
    outputs = to_tokens(as_tuple(o), units, cp)
    if after is not None:
        states = dict(zip(spec.states, as_tuple(after)))
        of_heads = [name for name, state in spec.states.items() if state.dims]
        states |= dict(zip(of_heads, gather_heads([states[name] for name in of_heads], units, cp)))
        after = tuple(states.values()) if len(states) > 1 else next(iter(states.values()))
    return outputs[0] if len(outputs) == 1 else tuple(outputs), after


def take_parameter(x: Any, units: int, cp: ContextParallel) -> Any:
    """A parameter of the heads of this rank; a number is one for all."""
    return take_heads(x, 0, units, cp) if isinstance(x, Tensor) and x.ndim else x
