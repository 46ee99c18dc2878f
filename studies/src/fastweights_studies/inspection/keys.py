"""The Gram matrix of the keys, how far it is from diagonal, and the diagonal preconditioner that is made from it."""

from __future__ import annotations

from typing import Any

import torch

from .panels import Panel, make_curve, make_histogram
from .reading import LayerReading

__all__ = ["key_gram", "preconditioner"]


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
    turn keys into write keys. Preconditioned DeltaNet, figures 2 and 13."""
    if "precond_beta" not in layer.values:
        return []
    panels = [make_histogram("energy", layer.states["A"], "key energy A", log_x=True)] if "A" in layer.states else []
    if "write_key" in layer.values:
        k = layer.per_head("k")
        seen = k.abs() > 1e-3 * k.abs().amax(2, keepdim=True)  # elsewhere rounding would decide
        factors = torch.where(seen, layer.per_head("write_key") / k, torch.nan)
        panels.append(make_histogram("factor", factors, "factor B of the write key"))
    return panels
