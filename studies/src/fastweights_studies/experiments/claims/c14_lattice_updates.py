"""C14: Lattice's closed forms are gradient steps that stay across the slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import lattice

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws

SLOTS, VALUES = 8, 12


def loss(S: Tensor, k: Tensor, v: Tensor, objective: str) -> Tensor:
    """Equations 6, 9 and 11 on the directions of the slots S [K, V]."""
    directions = F.normalize(S, dim=-1)
    if objective == "decode":
        return (directions.T @ k - v).square().sum() / 2
    if objective == "encode":
        return (directions @ v - k).square().sum() / 2
    return -(directions @ v) @ k


def measure(seed: int, device: str) -> dict[str, float]:
    draws, found = Draws(seed, device), {}
    S = draws.normal(SLOTS, VALUES).requires_grad_()
    unit = draws.unit(SLOTS, VALUES)
    k, v, gamma = draws.normal(SLOTS), draws.normal(VALUES), draws.uniform(1, 1, 1, low=0.1)
    for objective in ("decode", "encode", "similarity"):

        def step(start: Tensor, normalize: bool, objective: str = objective) -> Tensor:
            q, key, value = (x.view(1, 1, 1, -1) for x in (k, k, v))
            _, state = lattice(
                q, key, value, gamma, objective=objective, normalize=normalize, initial_state=start[None, None].detach(),
                output_final_state=True,
            )  # fmt: skip
            assert state is not None
            return state[0, 0]

        (gradient,) = torch.autograd.grad(loss(S, k, v, objective), S)
        change = step(S, False) - S
        found[f"{objective}, difference from the gradient step"] = (
            (change + gamma.item() * gradient).norm() / change.norm()
        ).item()
        found[f"{objective}, cosine of a slot and its change"] = (
            F.cosine_similarity(change, S, dim=-1).abs().max().item()
        )
        free = step(unit, False) - unit
        factor = (1 + free.square().sum(-1, keepdim=True)).rsqrt()
        found[f"{objective}, difference from the closed normalisation"] = (
            (step(unit, True) - factor * (unit + free)).abs().max().item()
        )
    return found


def decide(found: Measurement) -> Verdict:
    largest = max(map(found.largest, found.values))
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
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
