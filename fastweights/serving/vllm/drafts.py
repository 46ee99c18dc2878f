"""Where a step with drafted tokens reads and writes, the same for all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DraftedStep", "plan_drafts"]


class DraftedStep(NamedTuple):
    """A step of N sequences that lie one after another, of each at most S tokens.

    Attributes:
        tokens: of the step, with padding.
        places_NS: of the tokens in the output, which has one row more for tokens that are not there.
        own_NS: of the tokens in the input.
        rows_NS: of the states after them, 0 for tokens that are not there.
        sources_NS: the row of the state that a sequence goes on from; 0 likewise.
        prefix_places: [N * P], of sequences that are read up to each of their tokens one after another, P = S (S + 1) / 2
            tokens: their places in the step.
        prefix_edges: [N * S + 1], of these.
        prefix_ends_NS: their last tokens.
        prefix_rows: [N * S], of the pool without row 0, -1 for tokens that are not there.
    """

    tokens: int
    places_NS: Tensor
    own_NS: Tensor
    rows_NS: Tensor
    sources_NS: Tensor
    prefix_places: Tensor
    prefix_edges: Tensor
    prefix_ends_NS: Tensor
    prefix_rows: Tensor


def plan_drafts(tokens: int, rows_NS: Tensor, accepted_N: Tensor, edges: Tensor) -> DraftedStep:
    """What the layers of a step share.

    Args:
        tokens: of the step, those behind the last edge are padding.
        rows_NS: the rows of each sequence.
        accepted_N: how many tokens of the step before stay, at least 1. The state after the last of them is read.
        edges: [N+1].
    """
    count, steps = rows_NS.shape
    token_NS = edges[:-1, None].long() + torch.arange(steps, device=edges.device)
    reads_NS = token_NS < edges[1:, None]
    # Before the first request vLLM rehearses with counts of 0.
    source_N1 = rows_NS.gather(1, (accepted_N[:, None].long() - 1).clamp_min(0))
    own_NS = token_NS.clamp_max(tokens - 1)
    prefix_P = torch.tril_indices(steps, steps, device=edges.device)[1]
    ends_S = torch.arange(1, steps + 1, device=edges.device).cumsum(0)
    ends_NS = torch.arange(count, device=edges.device)[:, None] * len(prefix_P) + ends_S
    rows_NS = rows_NS.where(reads_NS, 0).long()
    return DraftedStep(
        tokens=tokens,
        places_NS=token_NS.where(reads_NS, tokens),
        own_NS=own_NS,
        rows_NS=rows_NS,
        sources_NS=source_N1.where(reads_NS, 0).long(),
        prefix_places=own_NS[:, prefix_P].flatten(),
        prefix_edges=F.pad(ends_NS.flatten(), (1, 0)).int(),
        prefix_ends_NS=ends_NS - 1,
        prefix_rows=rows_NS.flatten() - 1,
    )
