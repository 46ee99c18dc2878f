"""The ops that update their states in place, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights import ops
from fastweights.testing import CASES, OpCase, OpInputs


def _mean_and_deviation(*arguments: Any, **keywords: Any) -> Tensor:
    """As the case of the op does: the posterior's two results as one."""
    o, variance = ops.palimpsa_posterior_(*arguments, **keywords)
    return torch.cat([o, variance.sqrt()], -1)


IN_PLACE: dict[str, Callable[..., Tensor]] = {
    # Those of the library with a name of their own, and those of users.
    **{x: op.in_place for x, op in ops.OPS.items() if hasattr(ops, f"{x}_") or not hasattr(ops, x)},
    "palimpsa_posterior": _mean_and_deviation,
}
DECODING = {name: case for name, case in CASES.items() if case.spec.name in IN_PLACE}


def has_kernel(case: OpCase) -> bool:
    """Whether the kernel reads the tokens of this form; of some options it has a few values only."""
    kernel = case.spec.recurrent
    if kernel is None:
        return False
    has_options = all(case.case.options.get(name, served[0]) in served for name, served in kernel.only.items())
    return has_options and not set(kernel.without) & set(case.case.given)


BY_KERNEL = {name: case for name, case in DECODING.items() if has_kernel(case)}
POSITIVE = ("A", "J", "z")


def draw_states(case: OpCase, inputs: OpInputs, count: int, seed: int = 5) -> tuple[Tensor, ...]:
    """States in float64, of any numbers, of positive ones, positive definite, or a number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads, *_, value = inputs.tokens["v"].shape[2:]
    sizes = {"G": heads, "K": inputs.tokens["k"].shape[-1], "V": value}
    states = []
    for name, declared in case.spec.states.items():
        shape = [sizes[d] for d in declared.dims]
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        if declared.counts:
            x = torch.arange(17, 17 + count)
        elif declared.dims == "GKK":
            x = x @ x.mT / sizes["K"] + torch.eye(sizes["K"], dtype=torch.float64)
        elif name in POSITIVE:
            x = x.abs()
        states.append(x)
    return tuple(states)


def in_float32(state: Tensor) -> Tensor:
    """A state as the ops keep it: a number of tokens stays an integer."""
    return state.float() if state.is_floating_point() else state


def in_place(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], **keywords: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """o and the states after the call, in copies of these in the dtype of the computation."""
    dtype = torch.float64 if inputs.tokens["v"].dtype == torch.float64 else torch.float32
    held = tuple(
        s.to(inputs.tokens["v"].device, dtype if s.is_floating_point() else s.dtype, copy=True) for s in states
    )
    o = IN_PLACE[case.spec.name](**inputs.arguments(), state=case.initial_state(held), **keywords)
    return o, held


def exact(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], **keywords: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = inputs.map(lambda x: x.cpu().double())
    return case(inputs, initial_state=case.initial_state(states), backend="reference", **keywords)


def largest_error(got: tuple[Tensor, tuple[Tensor, ...]], wanted: tuple[Tensor, tuple[Tensor, ...]]) -> float:
    pairs = zip((got[0], *got[1]), (wanted[0], *wanted[1]), strict=True)
    return max(float(((g.cpu() - w).abs() / (1 + w.abs())).max()) for g, w in pairs if w.numel())


def call_decode(
    case: OpCase,
    inputs: OpInputs,
    states: tuple[Tensor, ...],
    new: tuple[Tensor, ...] | None,
    rows: Tensor | None = None,
) -> Any:
    """The kernel's own function on the inputs of a case."""
    from fastweights.kernels.recurrent import RecurrentCall

    defaults = {
        "scale": 8**-0.5, "bound": 1.5, "eps": 1e-6, "objective": "decode", "normalize": True, "l1": 0.0, "ridge": 0.02,
        "solver": "chebyshev", "adaptive_ridge": True, "refresh": 1e-3, "refresh_every": None,
    }  # fmt: skip
    options = {name: x for name, x in defaults.items() if name in case.spec.options}
    if case.spec.name == "variational_linear_attention":
        options["eps"] = 1e-4
    call = RecurrentCall(
        {**inputs.tokens, **inputs.parameters}, dict(zip(case.states, states)), {**options, **inputs.options},
        None if new is None else dict(zip(case.states, new)), state_indices=rows,
    )  # fmt: skip
    return case.spec.recurrent.decode(call)
