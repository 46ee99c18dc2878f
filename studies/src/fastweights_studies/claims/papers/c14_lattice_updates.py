"""C14: Lattice's closed forms are gradient steps that stay across the slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import lattice

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity

SLOTS, VALUES = 8, 12
OBJECTIVES = ("decode", "encode", "similarity")


def compute_loss(S: Tensor, k: Tensor, v: Tensor, objective: str) -> Tensor:
    """Equations 6, 9 and 11 on the directions of the slots S [K, V]."""
    directions = F.normalize(S, dim=-1)
    if objective == "decode":
        return (directions.T @ k - v).square().sum() / 2
    if objective == "encode":
        return (directions @ v - k).square().sum() / 2
    return -(directions @ v) @ k


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    S = draws.normal(SLOTS, VALUES).requires_grad_()
    unit = draws.unit(SLOTS, VALUES)
    k, v, gamma = draws.normal(SLOTS), draws.normal(VALUES), draws.uniform(1, 1, 1, low=0.1)

    def update(start: Tensor, objective: str, normalize: bool) -> Tensor:
        q, key, value = (x.view(1, 1, 1, -1) for x in (k, k, v))
        _, state = lattice(
            q,
            key,
            value,
            gamma,
            objective=objective,
            normalize=normalize,
            initial_state=start[None, None].detach(),
            output_final_state=True,
        )
        assert state is not None
        return state[0, 0]

    for objective in OBJECTIVES:
        column = {"objective": objective}
        (gradient,) = torch.autograd.grad(compute_loss(S, k, v, objective), S)
        change = update(S, objective, False) - S
        difference = (change + gamma.item() * gradient).norm() / change.norm()
        yield Number("step_difference", difference.item(), column)
        yield Number("cosine", F.cosine_similarity(change, S, dim=-1).abs().max().item(), column)
        free = update(unit, objective, False) - unit
        factor = (1 + free.square().sum(-1, keepdim=True)).rsqrt()
        difference = (update(unit, objective, True) - factor * (unit + free)).abs().max()
        yield Number("normalisation_difference", difference.item(), column)


def decide(found: Measurement) -> Verdict:
    largest = max(map(found.largest, ("step_difference", "cosine", "normalisation_difference")))
    return decided(largest < 1e-10, f"largest difference {largest:.1e} over the three objectives")


CLAIM = Claim(
    name="C14",
    paper="lattice",
    source="equations 7, 10, 12 and 14",
    says=(
        "The updates are gradient steps of the three losses, orthogonal to the slots, with factor (1 + "
        "|ds|^2)^(-1/2) to normalise."
    ),
    printed="equal",
    setting="8 slots of 12 numbers, one token, gradients of the losses by automatic differentiation, float64.",
    expected="holds",
    forecast="equal to rounding",
    rule="holds if step, orthogonality and normalisation are met to 1e-10 for all three objectives.",
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "step_difference": Quantity("{objective}, difference from the gradient step"),
        "cosine": Quantity("{objective}, cosine of a slot and its change"),
        "normalisation_difference": Quantity("{objective}, difference from the closed normalisation"),
    },
    seeds=(0, 1, 2),
    safe="identity",
)
