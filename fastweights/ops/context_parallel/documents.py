"""Which sequences cross the borders between the parts of a row, without reading their lengths on the host.

Of all sequences of a rank's part at most one came in from the rank before ("enters"), and at most one goes on to the next
("leaves"). They may be the same. R is the number of rows: sequences that can cross one border at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import all_gather
from .group import ContextParallel
from .halo import own_edges

__all__ = ["Documents", "Rows", "fold", "fold_back", "sequences_of_part"]


def sequences_of_part(
    cp: ContextParallel, cu_seqlens: Tensor | None, time: int, device: torch.device
) -> Documents | Rows:
    """The sequences of this rank's part of `time` tokens. cu_seqlens: of the whole row."""
    return Rows(cp) if cu_seqlens is None else Documents(cp, cu_seqlens, time, device)


class Rows:
    """Rows that are one sequence each: all enter and leave, but enter no first and leave no last rank.

    Attributes:
        cu_seqlens: of the part.
        leaves_from: number of the token that the leaving sequence has first in the part; None for the first.
    """

    cu_seqlens: Tensor | None = None
    leaves_from: Tensor | None = None

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp

    def place(self, initial: Tensor, entering: Tensor) -> Tensor:
        """The states [N, ...] that the sequences have before the part: `entering` [R, ...] for one that enters, the initial ones
        [N, ...] for those that begin here."""
        is_first = torch.full((), self.cp.rank == 0, device=entering.device)
        return torch.where(is_first, initial, entering)  # every rank's gradient goes through what all have exchanged

    def pick_leaving(self, states: Tensor) -> Tensor:
        """[R, ...] of [N, ...]; zeros where no sequence leaves."""
        return states

    def pick_entering(self, states: Tensor) -> Tensor:
        """[R, ...] of [N, ...]; zeros where no sequence enters."""
        return states

    def place_leaving(self, states: Tensor, count: int) -> Tensor:
        """[count, ...] of all sequences, with `states` [R, ...] for the one that leaves, zeros for others."""
        return states

    def begins_here(self, states: Tensor) -> Tensor:
        """`states` [R, ...] of the leaving sequence if it begins in this part, else zeros."""
        return torch.zeros_like(states) if self.cp.rank else states

    def crosses(self, rank: int, states: Tensor) -> Tensor:
        """`states` [R, ...] if the part of a rank lies inside one sequence, which both enters and leaves it, else zeros."""
        return states

    def of_entering(self, x: Tensor) -> Tensor:
        """[R, T, ...] with zeros in the tokens of sequences that do not enter."""
        return x

    def collect_final(self, states: Tensor) -> Tensor:
        """The states [N, ...] after the whole row, each from the rank that has its sequence's last token."""
        return all_gather(states, self.cp)[-1]


class Documents(Rows):
    """Sequences packed into one row: R is 1."""

    def __init__(self, cp: ContextParallel, cu_seqlens: Tensor, time: int, device: torch.device) -> None:
        super().__init__(cp)
        start = cp.rank * time
        stop = start + time
        self.cu_seqlens = own_edges(cu_seqlens, time, cp)
        edges = cu_seqlens.to(device, non_blocking=True).long()
        begin, end = edges[:-1], edges[1:]
        first = time * torch.arange(cp.size, device=device)[:, None]
        self.entering, self.leaving = ((begin < border) & (end > border) for border in (start, stop))
        self.continued = begin >= start
        self.crossed = ((begin < first) & (end > first + time)).any(1)
        self.enters_until = end.where(self.entering, start).amax() - start
        self.leaves_from = (begin.where(self.leaving, stop).amin() - start).clamp_min(0)
        self.owner = (end - 1).clamp_min(0) // time

    def place(self, initial: Tensor, entering: Tensor) -> Tensor:
        initial = _keep(self.continued, initial)
        return torch.where(_like(self.entering, initial), entering, initial)

    def pick_leaving(self, states: Tensor) -> Tensor:
        return _pick(self.leaving, states)

    def pick_entering(self, states: Tensor) -> Tensor:
        return _pick(self.entering, states)

    def place_leaving(self, states: Tensor, count: int) -> Tensor:
        return _keep(self.leaving, states.expand(count, *states.shape[1:]))

    def begins_here(self, states: Tensor) -> Tensor:
        return _keep((self.leaving & self.continued).any()[None], states)

    def crosses(self, rank: int, states: Tensor) -> Tensor:
        return _keep(self.crossed[rank, None], states)

    def of_entering(self, x: Tensor) -> Tensor:
        return _keep((torch.arange(x.shape[1], device=x.device) < self.enters_until)[None], x)

    def collect_final(self, states: Tensor) -> Tensor:
        return all_gather(states, self.cp)[self.owner, torch.arange(len(states), device=states.device)]


def fold(sequences: Rows, added: Tensor, kept: Tensor, apply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The state [R, ...] that enters this part, from what each part adds and keeps [size, R, ...]; zeros where none enters. The
    chain is in float64, whatever precision products of float32 have been set to.

    Every rank computes the states of all, so that all take part in the exchange of the gradients."""
    states = [torch.zeros_like(added[0], dtype=torch.float64)]
    for rank in range(sequences.cp.size - 1):
        before = sequences.crosses(rank, states[-1])
        states.append(apply(sequences.crosses(rank, kept[rank]).double(), before) + added[rank].double())
    return torch.stack(states)[sequences.cp.rank].to(added.dtype)


def fold_back(sequences: Rows, added: Tensor, passed: Tensor) -> Tensor:
    """The gradient of the state [R, G, K, V] that leaves this part.

    Args:
        added: what each part adds to the gradient of the state that enters it, [size, R, G, K, V].
        passed: the transitions of all parts, [size, R, G, K, K].
    """
    grad = torch.zeros_like(added[0], dtype=torch.float64)
    for rank in range(sequences.cp.size - 1, sequences.cp.rank, -1):
        before = sequences.crosses(rank, grad)
        grad = sequences.crosses(rank, passed[rank]).double().mT @ before + added[rank].double()
    return grad.to(added.dtype)


def _like(condition: Tensor, x: Tensor) -> Tensor:
    return condition.view(*condition.shape, *[1] * (x.ndim - condition.ndim))


def _keep(condition: Tensor, x: Tensor) -> Tensor:
    """x where the condition on its first dimensions holds, else zeros: no product, as 0 times NaN is NaN."""
    return x.masked_fill(~_like(condition, x), 0.0)


def _pick(chosen: Tensor, states: Tensor) -> Tensor:
    """[1, ...]: the state of the chosen sequence, or zeros."""
    return _keep(chosen.any()[None], states.index_select(0, chosen.long().argmax()[None]))
