"""Which sequences cross the borders between the parts of a row, without reading their lengths on the host.

Of all sequences of a rank's part at most one came in from the rank before ("enters"), and at most one goes on to the next
("leaves"). They may be the same. R is the number of rows: sequences that can cross one border at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .collectives import all_gather
from .group import ContextParallel

__all__ = ["Documents", "Rows", "begin_row", "fold", "fold_back", "sequences_of_part"]

# What the layers of a model have found of the row that they read, by a tensor that `begin_row` made and the other arguments of
# `sequences_of_part`. It goes with that tensor.
_found = WeakTensorKeyDictionary()


def begin_row(cu_seqlens: Tensor) -> Tensor:
    """cu_seqlens as a new tensor on the same memory, for the calls that read one row of tokens, forward and backward. They find
    once which sequences cross the borders.

    A tensor that was not made here may serve many rows: a CUDA graph that is replayed, say, overwrites it, which torch does not
    count. So calls with it find the sequences anew. A model calls this in every forward: in a graph each replay finds them.
    """
    row = cu_seqlens.detach()
    if not torch.compiler.is_compiling():
        _found[row] = {}
    return row


def sequences_of_part(
    cp: ContextParallel, cu_seqlens: Tensor | None, time: int, device: torch.device
) -> Documents | Rows:
    """The sequences of this rank's part of `time` tokens. cu_seqlens: of the whole row."""
    if cu_seqlens is None:
        return Rows(cp)
    found: dict[Any, Documents] = {} if torch.compiler.is_compiling() else _found.get(cu_seqlens, {})
    key = cp.name, time, device
    if key not in found:
        found[key] = Documents(cp, cu_seqlens, time, device)
    return found[key]


class Rows:
    """Rows that are one sequence each: all enter and leave, but enter no first and leave no last rank.

    Attributes:
        cu_seqlens: of the part; sequences of other parts are empty.
        read: [N], how many tokens each sequence has before this part; None where all have as many.
        leaves_from: number of the token that the leaving sequence has first in the part; None for the first.
    """

    cu_seqlens: Tensor | None = None
    read: Tensor | None = None
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
        self.cu_seqlens = (cu_seqlens - start).clamp(0, time)
        edges = cu_seqlens.to(device, non_blocking=True).long()
        begin, end = edges[:-1], edges[1:]
        first = time * torch.arange(cp.size, device=device)[:, None]
        self.entering, self.leaving = (_choose((begin < border) & (end > border)) for border in (start, stop))
        self.continued = begin >= start
        self.read = (start - begin).clamp_min(0)
        self.leaving_begins = (self.leaving.of & self.continued).any()[None]
        self.crossed = ((begin < first) & (end > first + time)).any(1)
        enters_until = end.where(self.entering.of, start).amax() - start
        self.tokens_of_entering = (torch.arange(time, device=device) < enters_until)[None]
        self.leaves_from = (begin.where(self.leaving.of, stop).amin() - start).clamp_min(0)
        self.owner = (end - 1).clamp_min(0) // time

    def place(self, initial: Tensor, entering: Tensor) -> Tensor:
        initial = _keep(self.continued, initial)
        return torch.where(_like(self.entering.of, initial), entering, initial)

    def pick_leaving(self, states: Tensor) -> Tensor:
        return self.leaving.pick(states)

    def pick_entering(self, states: Tensor) -> Tensor:
        return self.entering.pick(states)

    def place_leaving(self, states: Tensor, count: int) -> Tensor:
        return _keep(self.leaving.of, states.expand(count, *states.shape[1:]))

    def begins_here(self, states: Tensor) -> Tensor:
        return _keep(self.leaving_begins, states)

    def crosses(self, rank: int, states: Tensor) -> Tensor:
        return _keep(self.crossed[rank, None], states)

    def of_entering(self, x: Tensor) -> Tensor:
        return _keep(self.tokens_of_entering, x)

    def collect_final(self, states: Tensor) -> Tensor:
        return all_gather(states, self.cp)[self.owner, torch.arange(len(states), device=states.device)]


class _Chosen(NamedTuple):
    """At most one of N sequences. of: bool [N], whether each is it; is_there: bool [1]; number: [1], 0 where there is none."""

    of: Tensor
    is_there: Tensor
    number: Tensor

    def pick(self, states: Tensor) -> Tensor:
        """[1, ...]: its state, or zeros."""
        return _keep(self.is_there, states.index_select(0, self.number))


def _choose(of: Tensor) -> _Chosen:
    return _Chosen(of, of.any()[None], of.long().argmax()[None])


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
