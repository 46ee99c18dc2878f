"""The ways to run an op on a sequence that is divided over processes, and which one a call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..framework.checks import Sizes
from ..framework.spec import OpSpec
from .group import ContextParallel, as_context_parallel
from .heads import choose_units, run_on_heads

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
RUN: dict[str, Callable[..., tuple[Any, Any]]] = {"heads": run_on_heads}


def choose_way(spec: OpSpec, cp: ContextParallel, sizes: Sizes) -> str:
    """A key of `RUN`. "auto" is "heads" where every process gets one.

    Raises:
        ValueError: the op cannot do it that way.
    """
    has_heads = choose_units((sizes.H, sizes.G), cp.size) >= cp.size
    if cp.way == "state" and spec.passing is None:
        raise ValueError(
            f"way must be 'heads' or 'auto' for {spec.name}, whose state after a part is no affine function of the state before "
            "it, got 'state'"
        )
    if cp.way == "heads" or (cp.way == "auto" and spec.passing is None):
        if not has_heads:
            raise ValueError(
                f"cp_group must have at most as many processes as {spec.name} has value heads here, {sizes.G}, got {cp.size}; "
                "use more heads or fewer processes"
            )
        return "heads"
    return "heads" if cp.way == "auto" and has_heads else "state"


def run_divided(
    call: Callable[..., tuple[Any, Any]], spec: OpSpec, cp: ContextParallel, sizes: Sizes, given: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The outputs of this process's tokens, and the final states of whole sequences on every process.

    Args:
        call: `framework.call.call`.
        sizes: of this process's tokens.
        given: what `call` gets after the declaration, after the checks: inputs, options, the initial state of whole sequences,
            output_final_state, the cu_seqlens of whole sequences, backend.
    """
    return RUN[choose_way(spec, cp, sizes)](call, spec, cp, sizes, given)
