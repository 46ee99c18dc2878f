"""Comparisons that the contract tests share, and changes of the inputs of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.context_parallel.group import ContextParallel
from ..cases import OpCase, OpInputs


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, or the plain norm of the difference where wanted is zero."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    if not wanted.numel():
        return 0.0
    norm = wanted.double().norm()
    return float((got.double() - wanted.double()).norm() / (norm if norm > 0 else 1.0))


def assert_close(got: Any, wanted: Any, tolerance: float) -> None:
    """Each relative to its own norm, but what vanishes in theory and is rounding in practice to that of its neighbours, of
    which the rounding of float32 is allowed."""
    largest = max(float(w.double().norm()) for w in wanted)
    for g, w in zip(got, wanted, strict=True):
        rounding = max(1e-4 * tolerance, 0.0 if g.dtype == torch.float64 else 2.0**-23) * largest
        assert relative_error(g, w) <= tolerance or float((g.double() - w.double()).norm()) <= rounding


def values_and_gradients(
    case: OpCase,
    inputs: OpInputs,
    states: tuple[Tensor, ...] | None = None,
    seed: int = 1,
    part: ContextParallel | None = None,
    **keywords: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """(o, final states) and the gradients of a random linear function of all of them in every input and state. With `part` the
    o of this process's tokens, and its summands of the gradients."""
    inputs = inputs.map(lambda x: x.detach().clone().requires_grad_())
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]
    if states is not None:
        states = tuple(s.detach().clone().requires_grad_() if s.is_floating_point() else s for s in states)
        leaves += [s for s in states if s.is_floating_point()]
        keywords["initial_state"] = case.initial_state(states)
    time = next(iter(inputs.tokens.values())).shape[1]
    rank, size = (0, 1) if part is None else (part.rank, part.size)
    own = slice(rank * time // size, (rank + 1) * time // size)
    o, final = case(inputs.at((slice(None), own)), **keywords)
    results = [o, *final]
    generator = torch.Generator().manual_seed(seed)

    def draw_weights(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(o.device)

    terms = [(o.double() * draw_weights((o.shape[0], time, *o.shape[2:]))[:, own]).sum()]
    terms += [(x.double() * draw_weights(x.shape)).sum() / size for x in final if x.is_floating_point()]
    gradients = torch.autograd.grad(torch.stack(terms).sum(), leaves, materialize_grads=True)
    return [x.detach() for x in results], list(gradients)


def random_states(case: OpCase, inputs: OpInputs, **keywords: Any) -> tuple[Tensor, ...]:
    """States that a memory can be in: what is left after reading other inputs of the same sizes."""
    shuffled = inputs.map(lambda x: x.flip(0) if x.ndim > 2 else x)
    _, states = case(shuffled, **keywords)
    return tuple(s.detach() for s in states)


def replace_tokens(inputs: OpInputs, **tokens: Tensor) -> OpInputs:
    return OpInputs({**inputs.tokens, **tokens}, inputs.parameters, inputs.options)


def mix_extremes(
    case: OpCase, inputs: OpInputs, seed: int, scales: Sequence[float] = (0.0, 0.0, 1e-3, 1e-6)
) -> OpInputs:
    """An eighth of the tokens with what a trained model seldom has, and the first token as often as not: keys, queries and
    values times one of `scales`, log decays that leave little or nothing, gates of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def replace_some(x: Tensor, numbers: Sequence[float], kept: Tensor) -> Tensor:
        """One of the numbers in some of the tokens of some heads, and `kept` elsewhere."""
        shape = (*x.shape[:3], *(1 for _ in x.shape[3:]))
        chance = torch.full(shape, 0.125)
        chance[:, 0] = 0.5
        chosen = torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)]
        here = torch.rand(shape, generator=generator) < chance
        return torch.where(here.to(x.device), chosen.to(x), kept.to(x))

    changed = {}
    scale_of_key = torch.ones(())
    for name, x in inputs.tokens.items():
        kind = case.tokens[name]
        if "decay" in kind:
            changed[name] = replace_some(x, LOG_DECAYS, x)
        elif kind in ("gate", "value gate"):
            changed[name] = replace_some(x, (0.0, 1.0), x)
        elif kind == "write key":  # goes with the key
            changed[name] = x * scale_of_key
        elif kind.endswith(("key", "query", "value")):
            scale = replace_some(x, scales, torch.ones(()))
            changed[name] = x * scale
            scale_of_key = scale if kind in KEYS else scale_of_key
    return replace_tokens(inputs, **changed)


LOG_DECAYS = (-4.0, -15.0, -17.0, -25.0, -60.0, -100.0, -1000.0, -math.inf)
KEYS = ("key", "positive key")
EXTREMES = {
    "zero keys": lambda kind, x: torch.zeros_like(x) if kind in KEYS else x,
    "one key": lambda kind, x: x[:, :1].expand_as(x) if kind in KEYS else x,
    "decay 0": lambda kind, x: torch.full_like(x, -math.inf) if "decay" in kind else x,
    "some decay 0": lambda kind, x: torch.where(x < x.median(), -math.inf, x) if "decay" in kind else x,
    "strong decay": lambda kind, x: 100 * x if "decay" in kind else x,
    "decay 1": lambda kind, x: torch.zeros_like(x) if "decay" in kind else x,
    "gain 0": lambda kind, x: torch.zeros_like(x) if "gate" in kind else x,
    "gain 1": lambda kind, x: torch.ones_like(x) if "gate" in kind else x,
}
