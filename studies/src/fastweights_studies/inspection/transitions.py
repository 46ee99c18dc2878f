"""The linear map from one memory to the next: S_t = J_t S_(t-1) + what the token writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.layers import (
    DeltaNet,
    GatedKalmaNet,
    LinearAttention,
    MesaNet,
    PalimpsaD,
    PalimpsaM,
    RecursiveLeastSquares,
    VariationalLinearAttention,
)

from .panels import Panel, make_curve, make_histogram
from .reading import LayerReading

__all__ = ["Transitions", "jacobians", "transitions", "write_eigenvalues"]

DECAYED = (LinearAttention, PalimpsaD, PalimpsaM, GatedKalmaNet, MesaNet)


class Transitions(NamedTuple):
    """J_t = (I - w_t r_t^T) Diag(a_t), with w times the gain; w and r are None where nothing is taken out of the memory.

    All [T, heads, K].
    """

    decay: Tensor
    write: Tensor | None
    read: Tensor | None

    def apply(self, t: int, x_HKV: Tensor) -> Tensor:
        """J_t x."""
        x_HKV = self.decay[t][..., None] * x_HKV
        if self.write is None or self.read is None:
            return x_HKV
        return x_HKV - self.write[t][..., None] * torch.einsum("hk,hkv->hv", self.read[t], x_HKV)[:, None]


def transitions(layer: LayerReading) -> Transitions | None:
    """Of rules that change the memory linearly; None for others (softmax, Lattice, TTT, layers of users)."""
    mixer, values = layer.mixer, layer.values
    k_TGK = layer.per_head("k")
    decay = torch.ones_like(k_TGK)
    if "g" in values and not isinstance(mixer, RecursiveLeastSquares):  # the decay of rls is in its write keys
        g = layer.per_head("g")
        decay = decay * (g if g.ndim == 3 else g[..., None]).exp()
    if isinstance(mixer, DECAYED):
        return Transitions(decay, None, None)
    if not isinstance(mixer, (DeltaNet, RecursiveLeastSquares, VariationalLinearAttention)):
        return None
    if isinstance(mixer, VariationalLinearAttention) and mixer.options.normalize_keys:
        k_TGK = F.normalize(k_TGK, dim=-1)
    write = layer.per_head("write_key") if "write_key" in values else k_TGK
    if "beta" in values:
        write = layer.per_head("beta")[..., None] * write
    return Transitions(decay, write, k_TGK)


def jacobians(layer: LayerReading) -> list[Panel]:
    """Spectral norm of J_t at each place, and of the products of all J since the first token and since the place before:
    above 1 a gradient through the memory can grow. Variational Linear Attention, section 4.2 and table 2; Preconditioned
    DeltaNet, appendix E.2."""
    found = transitions(layer)
    if found is None:
        return []
    heads, channels = found.decay.shape[1:]
    identity = torch.eye(channels, dtype=torch.float64).expand(heads, -1, -1)
    norms: list[list[Tensor]] = [[], [], []]
    whole, start = identity, 0
    for end in layer.ends:
        piece = identity
        for t in range(start, end):
            piece, whole = found.apply(t, piece), found.apply(t, whole)
        step = found.apply(end - 1, identity)
        for kept, matrix in zip(norms, (step, piece, whole)):
            kept.append(torch.linalg.matrix_norm(matrix, ord=2))
        start = end
    names = {
        "step": "norm of the step's Jacobian",
        "piece": "norm of the product since the last place",
        "whole": "norm of the product since the start",
    }
    return [
        make_curve(name, layer.ends, torch.stack(kept), label, log_y=name != "step")
        for (name, label), kept in zip(names.items(), norms)
    ]


def write_eigenvalues(layer: LayerReading) -> list[Panel]:
    """beta k.w, the share of the answer to a key that a write replaces: 1 replaces all, above 2 the memory can grow.
    Preconditioned DeltaNet, figures 7, 15 and 16."""
    found = transitions(layer)
    if found is None or found.write is None or found.read is None:
        return []
    share = (found.write * found.read).sum(2)[..., None]
    panels = [make_histogram("write_eigenvalue", share, "write eigenvalue, gain x key . write key")]
    if "write_key" in layer.values:
        overlap = (layer.per_head("write_key") * found.read).sum(2)[..., None]
        panels.append(make_histogram("overlap", overlap, "key . write key"))
    return panels
