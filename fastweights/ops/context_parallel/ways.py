"""Choose how an op runs on a sequence that is divided over processes: by exchanging heads, or by passing states on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..framework.checks import Sizes, first_state
from ..framework.spec import OpSpec
from .costs import estimate_seconds, exchanged_bytes, summed_bytes
from .group import ContextParallel, as_context_parallel
from .heads import choose_units, run_on_heads
from .planned import PlannedGroup
from .states import run_by_state

__all__ = ["Divided", "choose_way", "divide", "run_divided"]


class Divided(NamedTuple):
    """Stands in the place of an initial state where the tokens are divided over processes."""

    initial_state: Any
    cp: ContextParallel


def divide(initial_state: Any, cp_group: Any) -> Any:
    """What `call` gets as the initial state of a call with this `cp_group`."""
    cp = as_context_parallel(cp_group)
    return initial_state if cp is None else Divided(initial_state, cp)


# Each takes (call, spec, cp, sizes, given), see `run_divided`.
RUN: dict[str, Callable[..., tuple[Any, Any]]] = {"heads": run_on_heads, "state": run_by_state}


def choose_way(spec: OpSpec, cp: ContextParallel, sizes: Sizes, given: tuple[Any, ...]) -> str:
    """A key of `RUN`. "auto" is the way that serves, of two the one that is expected to take less time.

    Raises:
        ValueError: the op cannot do it that way.
    """
    inputs, _, _, _, cu_seqlens, backend = given
    named = dict(zip(spec.inputs, inputs))
    has_heads = choose_units((sizes.H, sizes.G), cp.size) >= cp.size
    has_states = spec.passing is not None and spec.passing.serves(named)
    if cp.way == "state" and not has_states:
        given_inputs = "" if spec.passing is None else f" with {' and '.join(spec.passing.without)}"
        raise ValueError(
            f"way must be 'heads' or 'auto' for {spec.name}{given_inputs}, whose state after a part is no affine function of the "
            "state before it, got 'state'"
        )
    if not has_heads and (cp.way == "heads" or not has_states):
        raise ValueError(
            f"cp_group must have at most as many processes as {spec.name} has value heads here, {sizes.G}, got {cp.size}; "
            "use more heads or fewer processes"
        )
    if cp.way != "auto":
        return cp.way
    if not (has_heads and has_states):
        return "heads" if has_heads else "state"
    count = None if cu_seqlens is None else len(cu_seqlens) - 1
    seconds = estimate_seconds(spec, named, sizes, cp.size, count, backend)
    return "heads" if seconds["heads"] <= seconds["state"] else "state"  # min with a key breaks a graph


def run_divided(
    way: str,
    call: Callable[..., tuple[Any, Any]],
    spec: OpSpec,
    cp: ContextParallel,
    sizes: Sizes,
    given: tuple[Any, ...],
) -> tuple[Any, Any]:
    """The outputs of this process's tokens, and the final states of whole sequences on every process. Those of a `PlannedGroup`
    have no numbers.

    Args:
        way: a key of `RUN`.
        call: `framework.call.call`.
        sizes: of this process's tokens.
        given: what `call` gets after the declaration, after the checks: inputs, options, the initial state of whole sequences,
            output_final_state, the cu_seqlens of whole sequences, backend.
    """
    if isinstance(cp.group, PlannedGroup):
        return _plan(way, cp.group, spec, sizes, given)
    return RUN[way](call, spec, cp, sizes, given)


def _plan(way: str, group: PlannedGroup, spec: OpSpec, sizes: Sizes, given: tuple[Any, ...]) -> tuple[Any, Any]:
    inputs, _, _, final, cu_seqlens, _ = given
    named, is_packed = dict(zip(spec.inputs, inputs)), cu_seqlens is not None
    group.note(way, exchanged_bytes(spec, named, sizes, group.size(), way, is_packed))
    if way == "state":
        group.note_held(summed_bytes(spec, named, sizes))
    like, count = inputs[0], len(cu_seqlens) - 1 if is_packed else sizes.B
    outputs = [like.new_empty(sizes.B, sizes.T, *sizes.shape(output.dims)) for output in spec.outputs.values()]
    states = [first_state(spec, name, sizes, count, like) for name in spec.states] if final else None
    return outputs, states
