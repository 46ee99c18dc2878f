"""What a short convolution needs of tokens that other processes hold: the inputs before its own part, and the last of all.

Sequences are rows of x [B, T, D], or documents packed into one row. T is the number of tokens of one process. `window` are the
inputs before whole sequences, [N, count, D] on every process, zeros when None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import all_gather, all_to_all
from .documents import Rows
from .group import ContextParallel

__all__ = ["last_inputs", "read_halo"]


def read_halo(x: Tensor, count: int, window: Tensor | None, sequences: Rows) -> Tensor:
    """[N, count, D]: the inputs before this process's part of each sequence, of its document alone. count: 1 to T."""
    cp, read_N = sequences.cp, sequences.read
    tail = x[:, x.shape[1] - count :]
    behind, before = (cp.rank + 1) % cp.size, (cp.rank - 1) % cp.size  # a ring: each process has the same graph
    sent, received = ([tail.numel() * (rank == other) for rank in range(cp.size)] for other in (behind, before))
    halo = all_to_all(tail.flatten(), sent, received, cp).view(tail.shape)
    if read_N is None:
        is_read = torch.full((1, 1), cp.rank > 0, device=x.device)
        return _choose(is_read, halo, window)
    return _choose(_reach(read_N, count), halo, _shift(window, read_N))


def last_inputs(x: Tensor, count: int, window: Tensor | None, edges: Tensor | None, cp: ContextParallel) -> Tensor:
    """[N, count, D]: the last inputs of whole sequences, on every process. count: 1 to T; edges: cumulative lengths [N+1] of the
    documents of the whole row."""
    time = x.shape[1]
    if edges is None:
        return all_gather(x[:, time - count :], cp)[-1]
    lengths_N = edges.diff()
    place_Nc = edges[1:, None] - count + torch.arange(count, device=x.device) - cp.rank * time
    is_read = _reach(lengths_N, count)
    is_own = is_read & (place_Nc >= 0) & (place_Nc < time)
    own = x[0][place_Nc.clamp(0, time - 1)].masked_fill(~is_own[..., None], 0)
    if cp.rank == 0:  # the inputs before a sequence are here once
        own = _choose(is_read, own, _shift(window, lengths_N))
    return all_gather(own, cp).sum(0)


def _reach(read_N: Tensor, count: int) -> Tensor:
    """[N, count]: which of the inputs before a token are tokens of its sequence, `read` of which came before it."""
    return read_N[:, None] >= count - torch.arange(count, device=read_N.device)


def _shift(window: Tensor | None, read_N: Tensor) -> Tensor | None:
    """The window `read` tokens later, as far as it is not tokens."""
    if window is None:
        return None
    count = window.shape[1]
    place = (torch.arange(count, device=read_N.device) + read_N[:, None]).clamp_max(count - 1)
    return window.gather(1, place[..., None].expand(window.shape).long())


def _choose(is_read: Tensor, tokens: Tensor, window: Tensor | None) -> Tensor:
    return torch.where(is_read[..., None], tokens, tokens.new_zeros(()) if window is None else window)
