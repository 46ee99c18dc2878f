"""The Gram matrix of the keys, how far it is from diagonal, and the diagonal preconditioner that is made from it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.precondition import SQUASHES

from .panels import Panel, make_curve, make_histogram
from .reading import LayerReading

__all__ = ["gates", "key_gram", "preconditioner"]

EPS = 1e-6  # that the op adds to A


def key_gram(layer: LayerReading) -> list[Panel]:
    """Eigenvalues of sum_t k_t k_t^T and, sorted likewise, its diagonal; over time the mean of the largest entry of each
    eigenvector, weighted by the eigenvalues: 1 where the eigenvectors are axes, K^-1/2 where none is near one.
    Preconditioned DeltaNet, figure 1."""
    k_THK = layer.values["k"]
    outer = torch.stack([torch.einsum("thi,thj->hij", piece, piece) for piece in k_THK.tensor_split(layer.ends[:-1])])
    gram_PHKK = outer.cumsum(0)
    values_PHK, vectors_PHKK = torch.linalg.eigh(gram_PHKK)
    values_PHK = values_PHK.clamp_min(0)
    largest_PHK = vectors_PHKK.abs().amax(2)  # of the entries of each eigenvector, a column
    alignment_PH = (values_PHK * largest_PHK).sum(2) / values_PHK.sum(2)
    place = torch.arange(1, k_THK.shape[2] + 1, dtype=torch.float64)
    spectrum = values_PHK[-1].flip(1).T
    diagonal = gram_PHKK[-1].diagonal(dim1=1, dim2=2).sort(1, descending=True).values.T
    ranked: dict[str, Any] = {"x": place, "x_label": "rank", "log_y": True}
    return [
        Panel(name="eigenvalues", y=spectrum, y_label="eigenvalue of the key Gram matrix", **ranked),
        Panel(name="diagonal", y=diagonal, y_label="diagonal of the key Gram matrix", **ranked),
        make_curve("alignment", layer.ends, alignment_PH, "alignment of eigenvectors with axes"),
    ]


def preconditioner(layer: LayerReading) -> list[Panel]:
    """Distributions over places and key channels of the key energy A, and over tokens and key channels of the factors B that
    turn keys into write keys; the learned centre of log A; and for each squashing function f the factor x^-f(r) by the distance r
    of log A from the centre, and the mean of |f(r)| over key channels. Preconditioned DeltaNet, figures 2 and 11 to 13."""
    if "precond_beta" not in layer.values:
        return []
    panels = [make_histogram("energy", layer.states["A"], "key energy A", log_x=True)] if "A" in layer.states else []
    if "write_key" in layer.values:
        k = layer.per_head("k")
        seen = k.abs() > 1e-3 * k.abs().amax(2, keepdim=True)  # elsewhere rounding would decide
        factors = torch.where(seen, layer.per_head("write_key") / k, torch.nan)
        panels.append(make_histogram("factor", factors, "factor B of the write key"))
        if layer.mixer.preconditioner.center is not None and "A" in layer.states:
            panels += squashing(layer, layer.mixer.preconditioner)
    return panels


def squashing(layer: LayerReading, own: Any) -> list[Panel]:
    """The centre, and what each function that may squash log A does around it."""
    center_H = own.center.detach().double().cpu()
    distance_PHK = (layer.states["A"] + EPS).log() - center_H[:, None]
    near = torch.arange(-80, 81, dtype=torch.float64) / 10
    x_label = "distance of log A from its centre"
    panels = [make_curve("center", layer.ends[-1:], center_H[None], "learned centre of log A")]
    for name, squash in SQUASHES.items():
        factor = own.factor * torch.exp(-math.log(own.bound) * squash(near))
        panels.append(Panel(name=f"by_{name}", x=near, y=factor[:, None], x_label=x_label, y_label=f"factor by {name}"))
        saturation_PH = squash(distance_PHK).abs().mean(2)
        panels.append(make_curve(f"saturation_{name}", layer.ends, saturation_PH, f"mean saturation of {name}"))
    return panels


def gates(layer: LayerReading) -> list[Panel]:
    """Distributions of the decays and gains of the memory, over tokens (and key channels). Preconditioned DeltaNet, figure 14,
    compares those of models with and without a normalised write key: inspect each of them."""
    shown: dict[str, tuple[str, Tensor]] = {}
    if "g" in layer.values:
        shown["decay"] = "decay", layer.values["g"].exp()
    if "beta" in layer.values:
        shown["gain"] = "gain beta", layer.values["beta"]
    return [make_histogram(name, x if x.ndim > 2 else x[..., None], label) for name, (label, x) in shown.items()]
