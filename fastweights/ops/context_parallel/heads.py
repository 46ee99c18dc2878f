"""Exchanging heads for tokens around a function of whole sequences: each process computes some heads over all tokens.

The declaration of an op says where the heads of a tensor are, so no rule needs code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..framework.checks import Sizes, as_tuple
from ..framework.in_torch import expand_heads
from ..framework.spec import OpSpec
from .exchange import gather_heads, take_heads, to_heads, to_tokens
from .group import ContextParallel, as_context_parallel

__all__ = ["choose_units", "on_heads", "run_on_heads"]


def choose_units(heads: Sequence[int], ranks: int) -> int:
    """How many units of heads the processes share, for tensors of these numbers of heads, which divide each other: as many as the
    fewest. Those are repeated, as often as makes the shares equal where that is possible, else once for each of the most."""
    fewest, most = min(heads), max(heads)
    fitting = [n for n in range(fewest, most + 1, fewest) if all(n % h == 0 or h % n == 0 for h in heads)]
    return next((n for n in fitting if n % ranks == 0), fitting[-1])


def exchange_heads(tensors: Sequence[Tensor], units: int, cp: ContextParallel) -> Sequence[Tensor]:
    """`to_heads` of tensors that may have fewer heads than there are units."""
    return to_heads([expand_heads(x, units) if x.shape[2] < units else x for x in tensors], units, cp)


def on_heads(function: Callable[..., Tensor], *tensors: Tensor, cp_group: Any) -> Tensor:
    """function(*tensors), where the function looks across tokens within a head and `cp_group` divides the tokens.

    Softmax attention, say: `on_heads(attend, q, k, v, cp_group=group)`.

    Args:
        function: takes tensors [B, T, heads, ...] of whole sequences and of some heads; returns [B, T, most heads, ...].
        tensors: [B, T / N, heads, ...] of this process, one of N. Numbers of heads divide each other.
        cp_group: as for an op.

    Returns:
        The part of the result that belongs to the tokens of this process.

    Raises:
        ValueError: more processes than heads.
    """
    cp = as_context_parallel(cp_group)
    if cp is None:
        return function(*tensors)
    heads = [x.shape[2] for x in tensors]
    units = choose_units(heads, cp.size)
    if units < cp.size:
        raise ValueError(
            f"cp_group must have at most as many processes as there are heads, {max(heads)}, got {cp.size}; use more heads or "
            "fewer processes"
        )
    return to_tokens([function(*exchange_heads(tensors, units, cp))], units, cp)[0]


def run_on_heads(
    call: Callable[..., tuple[Any, Any]], spec: OpSpec, cp: ContextParallel, sizes: Sizes, given: tuple[Any, ...]
) -> tuple[Any, Any]:
    """As `run_divided`."""
    inputs, options, before, final, cu_seqlens, backend = given
    units = choose_units((sizes.H, sizes.G), cp.size)
    named = dict(zip(spec.inputs, inputs))
    tokens = {name: x for name, x in named.items() if name not in spec.parameters and x is not None}
    named |= dict(zip(tokens, exchange_heads(list(tokens.values()), units, cp)))
    for name in spec.parameters:
        x = named[name]
        named[name] = take_heads(x, 0, units, cp) if isinstance(x, Tensor) and x.ndim else x
    if before is not None:
        declared = zip(as_tuple(before), spec.states.values())
        before = tuple(take_heads(x, 1, units, cp) if state.dims else x for x, state in declared)
    o, after = call(spec, tuple(named.values()), options, before, final, cu_seqlens, backend)
    outputs = to_tokens(as_tuple(o), units, cp)
    if after is not None:
        states = dict(zip(spec.states, as_tuple(after)))
        of_heads = [name for name, state in spec.states.items() if state.dims]
        states |= dict(zip(of_heads, gather_heads([states[name] for name in of_heads], units, cp)))
        after = tuple(states.values())
    return outputs, after
