"""Where a step with drafted tokens reads and writes, the same for all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DraftedStep", "plan_drafts"]


class DraftedStep(NamedTuple):
    """A step of N sequences that lie one after another, of each at most S tokens.

    Attributes:
        tokens: of the step, with padding.
        regular: whether its tokens lie as [N, S]; see `plan_drafts`.
        places_NS: of the tokens in the output, which has one row more for tokens that are not there.
        own_NS: of the tokens in the input.
        rows_NR: R = 1 + S rows of the pool without row 0: of the state that a sequence goes on from, and of those after its
            tokens; -1 for tokens and sequences that are not there.
    """

    tokens: int
    regular: bool
    places_NS: Tensor
    own_NS: Tensor
    rows_NR: Tensor


def plan_drafts(tokens: int, rows_NS: Tensor, accepted_N: Tensor, edges: Tensor, regular: bool = False) -> DraftedStep:
    """What the layers of a step share.

    Args:
        tokens: of the step, those behind the last edge are padding.
        rows_NS: the rows of each sequence.
        accepted_N: how many tokens of the step before stay, at least 1. The state after the last of them is read.
        edges: [N+1].
        regular: whether each sequence has S tokens, or is padding and has as much room.
    """
    token_NS = edges[:-1, None].long() + torch.arange(rows_NS.shape[1], device=edges.device)
    reads_NS = token_NS < edges[1:, None]
    # Before the first request vLLM rehearses with counts of 0.
    source_N1 = rows_NS.gather(1, (accepted_N[:, None].long() - 1).clamp_min(0))
    return DraftedStep(
        tokens=tokens,
        regular=regular,
        places_NS=token_NS.where(reads_NS, tokens),
        own_NS=token_NS.clamp_max(tokens - 1),
        rows_NR=torch.cat([source_N1.where(reads_NS[:, :1], 0), rows_NS.where(reads_NS, 0)], 1) - 1,
    )
