"""The ridge regressions of Gated KalmaNet and MesaNet: how hard they are, how fast the solvers get there, what that costs the
gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.layers import GatedKalmaNet, MesaNet
from fastweights.ops import gated_kalmanet
from fastweights.ops.shared.ridge.iterations import SOLVERS, chebyshev_weights, iterate
from fastweights.ops.shared.ridge.system import ridge_and_norm

from .panels import Panel, make_curve
from .reading import LayerReading

__all__ = ["condition", "find_ridge", "gradient_error", "reversal_divisors", "solver_residuals"]

ITERATIONS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60)
DIVISORS = 30  # iterations
GRADIENT_ITERATIONS = (1, 3, 10, 30)  # each is a pass through the whole model


def find_ridge(layer: LayerReading) -> tuple[Tensor, Tensor] | None:
    """The diagonal that is added to H at each place and |H|_F, [P, heads, K] and [P, heads, 1]; None for other layers."""
    if "H" not in layer.states or not isinstance(layer.mixer, (GatedKalmaNet, MesaNet)):
        return None
    H_PGKK, mixer = layer.states["H"], layer.mixer
    squared_norm = H_PGKK.square().sum((2, 3))[..., None]
    if isinstance(mixer, GatedKalmaNet):
        ridge, norm = ridge_and_norm(mixer.options.ridge, mixer.options.adaptive_ridge, squared_norm)
    else:
        ridge, norm = layer.values["ridge"], squared_norm.sqrt()
    return ridge.expand(H_PGKK.shape[:3]), norm


def condition(layer: LayerReading) -> list[Panel]:
    """Condition number of H + ridge at each place. Gated KalmaNet, section 4.1."""
    found = find_ridge(layer)
    if found is None:
        return []
    eigenvalues = torch.linalg.eigvalsh(layer.states["H"] + torch.diag_embed(found[0]))
    return [
        make_curve("condition", layer.ends, eigenvalues[..., -1] / eigenvalues[..., 0], "condition number", log_y=True)
    ]


def solver_residuals(layer: LayerReading) -> list[Panel]:
    """|(H + ridge) x - q| / |q| by iteration, in float64, the largest over the places. Gated KalmaNet, figures 1a and 8."""
    found = find_ridge(layer)
    if found is None:
        return []
    ridge_PGK, norm_PG1 = found
    matrix = layer.states["H"] + torch.diag_embed(ridge_PGK)
    q_PGK = read_queries(layer)
    low_PG1 = ridge_PGK.amin(2, keepdim=True)
    norm_PG1 = norm_PG1 + ridge_PGK.amax(2, keepdim=True) - low_PG1  # the eigenvalues are in [low, low + norm]

    def multiply(x: Tensor) -> Tensor:
        return (matrix @ x[..., None])[..., 0]

    def residual(x: Tensor) -> Tensor:
        return ((multiply(x) - q_PGK).norm(dim=2) / q_PGK.norm(dim=2).clamp_min(1e-30)).amax(0)

    x = torch.tensor(ITERATIONS, dtype=torch.float64)
    panels = []
    for solver in SOLVERS:
        if solver == "exact":
            continue
        y = [residual(iterate(solver, multiply, q_PGK, low_PG1, norm_PG1, n)) for n in ITERATIONS]
        label = f"residual, {solver.replace('_', ' ')}"
        panels.append(
            Panel(name=solver, x=x, y=torch.stack(y), x_label="iterations", y_label=label, log_x=True, log_y=True)
        )
    return panels


def reversal_divisors(layer: LayerReading) -> list[Panel]:
    """What a solver run backwards divides by, by iteration, the least and the largest over the places: of x_i = A_i x_(i-1) + b_i
    x_(i-2) + c_i q the number -b_i. For Chebyshev's iteration it lies between its limit and 1, for conjugate gradients anywhere.
    Gated KalmaNet, appendix C.1 and figure 5."""
    found = find_ridge(layer)
    if found is None:
        return []
    ridge_PGK, norm_PG1 = found
    matrix, q_PGK = layer.states["H"] + torch.diag_embed(ridge_PGK), read_queries(layer)
    low, spread = ridge_PGK.amin(2), norm_PG1[..., 0] + ridge_PGK.amax(2) - ridge_PGK.amin(2)
    weights = torch.stack(list(chebyshev_weights(spread / (2 * low + spread), DIVISORS)))
    divisors = {"chebyshev": weights - 1, "conjugate_gradient": momentum(matrix, q_PGK, DIVISORS)}
    x = torch.arange(1, DIVISORS + 1, dtype=torch.float64)
    panels = []
    for name, found_IPG in divisors.items():
        ends = {"least": found_IPG.nan_to_num(torch.inf).amin(1), "largest": found_IPG.nan_to_num(-torch.inf).amax(1)}
        for which, y in ends.items():
            y_label = f"{which} divisor, {name.replace('_', ' ')}"
            y = torch.where(y.isfinite(), y, torch.nan)
            panels.append(Panel(name=f"{name}_{which}", x=x, y=y, x_label="iteration", y_label=y_label, log_y=True))
    return panels


def momentum(matrix_PGKK: Tensor, q_PGK: Tensor, iterations: int) -> Tensor:
    """[iterations, P, G]: by what conjugate gradients multiply the last change of x, a_i b_i / a_(i-1) with the steps a along
    directions r + b times the one before; NaN in the first iteration, and once the residual is rounding."""
    residual, direction = q_PGK, q_PGK
    square, step_before = residual.square().sum(2), torch.full(q_PGK.shape[:2], torch.nan, dtype=q_PGK.dtype)
    growth = step_before
    smallest = 1e-24 * square
    found = []
    for _ in range(iterations):
        image = (matrix_PGKK @ direction[..., None])[..., 0]
        step = square / (direction * image).sum(2)
        found.append(torch.where(square > smallest, step * growth / step_before, torch.nan))
        residual = residual - step[..., None] * image
        square_before, square, step_before = square, residual.square().sum(2), step
        growth = square / square_before
        direction = residual + growth[..., None] * direction
    return torch.stack(found)


def read_queries(layer: LayerReading) -> Tensor:
    """The right-hand sides at the places, [P, G, K]: of a sketch in coordinates of its own."""
    q_PGK = layer.select_ends(layer.per_head("q"))
    is_sketched = q_PGK.shape[2] != layer.states["H"].shape[2]
    return layer.mixer.sketch(q_PGK[None])[0].detach() if is_sketched else q_PGK


def gradient_error(model: Any, layers: Sequence[LayerReading], ids_T: Tensor) -> dict[int, list[Panel]]:
    """How far gradients by the solvers are from those by the exact one, by iteration: |d - d exact| / |d exact|, by layer.

    "one_layer": of q and k of the layer alone, through its op in the dtype of the model (in all dimensions where the layer has a
    sketch). "stack": of all weights of the layer, from the loss of the whole model, in which every solver is exchanged.
    The solvers are Chebyshev's, conjugate gradients and those of the layers. Gated KalmaNet, figures 1b to 1e.
    """
    solved = [layer for layer in layers if isinstance(layer.mixer, GatedKalmaNet)]
    if not solved:
        return {}
    with _solve_by(solved, "exact"):
        exact = _gradients(model, solved, ids_T)
    x = torch.tensor(GRADIENT_ITERATIONS, dtype=torch.float64)
    found: dict[int, list[Panel]] = {layer.index: [] for layer in solved}
    own_solvers = (layer.mixer.options.solver for layer in solved)
    for solver in dict.fromkeys(("chebyshev", "conjugate_gradient", *own_solvers)):
        if solver == "exact":
            continue
        errors = []  # by iteration, layer, and one layer or stack
        for iterations in GRADIENT_ITERATIONS:
            with _solve_by(solved, solver, iterations):
                own = _gradients(model, solved, ids_T)
            errors.append([list(map(_distance, *both)) for both in zip(own, exact)])
        for place, layer in enumerate(solved):
            for which, (name, what) in enumerate(
                (("one_layer", "q and k, this layer alone"), ("stack", "weights, whole model"))
            ):
                panel = Panel(
                    name=f"{name}_{solver}", x=x, y=torch.stack([row[place][which] for row in errors]), x_label="iterations",
                    y_label=f"gradient error, {what}, {solver.replace('_', ' ')}", log_x=True, log_y=True,
                )  # fmt: skip
                found[layer.index].append(panel)
    return found


@contextmanager
def _solve_by(layers: Sequence[LayerReading], solver: str, iterations: int | None = None) -> Iterator[None]:
    """In the body the layers solve in this way."""
    before = [layer.mixer.options for layer in layers]
    try:
        for layer, options in zip(layers, before):
            count = options.iterations if iterations is None else iterations
            layer.mixer.options = dataclasses.replace(options, solver=solver, iterations=count)
        yield
    finally:
        for layer, options in zip(layers, before):
            layer.mixer.options = options


def _gradients(model: Any, layers: Sequence[LayerReading], ids_T: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each layer: those in its q and k, and those in its weights."""
    return [
        (_op_gradients(layer, model.dtype), own) for layer, own in zip(layers, _loss_gradients(model, layers, ids_T))
    ]


def _loss_gradients(model: Any, layers: Sequence[LayerReading], ids_T: Tensor) -> list[list[Tensor]]:
    """Of the loss, in the weights of each layer."""
    with torch.enable_grad():
        loss = model(ids_T[None], labels=ids_T[None], use_cache=False).loss
        weights = [[x for x in layer.mixer.parameters() if x.requires_grad] for layer in layers]
        flat = iter(torch.autograd.grad(loss, [x for own in weights for x in own], materialize_grads=True))
    return [[next(flat).double().cpu() for _ in own] for own in weights]


def _op_gradients(layer: LayerReading, dtype: torch.dtype) -> list[Tensor]:
    """Gradients in q and k [T, heads, K] of random sums of the answers, by the layer's solver."""
    values, options = layer.values, layer.mixer.options
    q, k = (values[name].to(dtype)[None].requires_grad_() for name in ("q", "k"))
    v, mix = values["v"].to(dtype)[None], values["mix"][None] if "mix" in values else None
    g = values["g"][None] if "g" in values else torch.zeros_like(v[..., 0])
    with torch.enable_grad():
        o, _ = gated_kalmanet(
            q, k, v, g, mix=mix, ridge=options.ridge, adaptive_ridge=options.adaptive_ridge, iterations=options.iterations,
            solver=options.solver,
        )  # fmt: skip
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o.dtype)
        return [d[0].double() for d in torch.autograd.grad((o * weights).sum(), (q, k))]


def _distance(own: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Of tensors [T, heads, K] one number per head, of weights one in all: [heads] or [1]."""
    heads = own[0].ndim == 3
    a, b = ([x.transpose(0, 1).flatten(1) if heads else x.reshape(1, -1) for x in part] for part in (own, exact))
    difference = torch.cat([x - y for x, y in zip(a, b)], 1)
    return difference.norm(dim=1) / torch.cat(b, 1).norm(dim=1).clamp_min(1e-300)
