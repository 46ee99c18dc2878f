"""The memory slots of Lattice and of layers whose memory has rows of one length."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastweights.layers import Lattice

from .panels import Panel, make_curve
from .reading import LayerReading

__all__ = ["slots"]


def slots(layer: LayerReading) -> list[Panel]:
    """Overlap: mean |cos| between two slots. Novelty: the part of the next token's direction h that is orthogonal to a slot,
    |(I - phi phi^T) h| / |h|, mean over slots. Lattice, sections 3 and 5.1."""
    if not isinstance(layer.mixer, Lattice):
        return []
    S_PGKV = F.normalize(layer.states["S"], dim=3)
    cosines = S_PGKV @ S_PGKV.mT
    count = cosines.shape[-1]
    others = cosines.abs().sum((2, 3)) - cosines.diagonal(dim1=2, dim2=3).abs().sum(2)
    panels = [make_curve("overlap", layer.ends, others / max(1, count * (count - 1)), "mean |cos| of two slots")]
    followed = [place for place, end in enumerate(layer.ends) if end < len(layer.values["v"])]
    if followed:
        after = torch.tensor([layer.ends[place] for place in followed])  # the token after the place
        slots_PGKV, v_PGV = S_PGKV[followed], layer.values["v"][after]
        h_PGV = v_PGV
        if layer.mixer.options.objective == "decode":
            h_PGV = torch.einsum("pgkv,pgk->pgv", slots_PGKV, layer.per_head("k")[after]) - v_PGV
        inside = torch.einsum("pgkv,pgv->pgk", slots_PGKV, F.normalize(h_PGV, dim=2))
        novelty = (1 - inside.square()).clamp_min(0).sqrt().mean(2)
        panels.append(make_curve("novelty", [layer.ends[p] for p in followed], novelty, "part orthogonal to a slot"))
    return panels
