"""NaN and infinity stay where they belong. A matrix product over a chunk would carry them to every token of the chunk
(0 * NaN = NaN), so inputs are cleaned before the computation, and what depends on a bad number is made NaN after it.

A log decay of -inf (decay 0) is a legal number and stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .checks import values_can_be_read
from .sequences import Sequences


def is_bad(name: str, x: Tensor) -> Tensor:
    bad = ~x.isfinite()
    return bad & (x != -math.inf) if name.endswith("g") else bad


def clean(name: str, x: Tensor) -> Tensor:
    return x.masked_fill(is_bad(name, x), 0.0)


class Quarantine:
    """Where bad numbers sit in the inputs of one call, and what they reach.

    tokens: [B, T, H, ...] by name; states: [N, H, ...] by name; columns: the names whose last dimension is the one of
    the output (a bad number there reaches its own column only; elsewhere it reaches the whole head)."""

    def __init__(
        self,
        tokens: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        sequences: Sequences,
        columns: Collection[str],
    ) -> None:
        self.sequences = sequences
        self.columns = columns
        self.tokens = {name: is_bad(name, x) for name, x in tokens.items()}
        self.states = {name: ~x.isfinite() for name, x in states.items()}

    @staticmethod
    def is_needed(*inputs: Mapping[str, Tensor]) -> bool:
        """Whether there is anything bad; assumed where looking would cost a wait or break a graph."""
        pairs = [pair for group in inputs for pair in group.items()]
        if not all(values_can_be_read(x) for _, x in pairs):
            return True
        return any(is_bad(name, x).any() for name, x in pairs)

    def _bad_states(self, names: Collection[str]) -> Tensor:
        """[N, H, 1 or columns]: initial states among `names` that hold a bad number."""
        return _either([self._reached(name, bad, 2) for name, bad in self.states.items() if name in names])

    def _reached(self, name: str, bad: Tensor, heads: int) -> Tensor:
        """Bad elements of one input, whose first `heads` dimensions end with the heads -> what they reach,
        [..., heads, 1 or columns]."""
        bad = bad[..., None] if bad.ndim == heads else bad
        if name in self.columns:
            return bad.flatten(heads, -2).any(heads) if bad.ndim > heads + 1 else bad
        return bad.flatten(heads).any(-1, keepdim=True)

    def _seen(self, names: Collection[str]) -> Tensor:
        """[B, T, H, 1 or columns]: a token at or before this one, in its sequence, holds a bad number."""
        bad = _either([self._reached(name, bad, 3) for name, bad in self.tokens.items() if name in names])
        counts = bad.cumsum(1)
        if self.sequences.lengths is not None:
            before = (counts - bad.long())[0]
            lengths = torch.tensor(self.sequences.lengths, device=bad.device)
            first = (lengths.cumsum(0) - lengths).clamp_max(max(self.sequences.time - 1, 0))
            counts = counts - before[first[self.sequences.index_of_token(bad.device)]]
        return counts > 0

    def mark_output(self, o: Tensor, names: Collection[str], local: Collection[str]) -> Tensor:
        """o [B, T, H, columns] with NaN wherever it depends on something bad among `names`; the `local` ones reach the
        output of their own token only."""
        bad = self._seen(names)
        from_state = self._bad_states(names)
        if self.sequences.lengths is None:
            bad = bad | from_state[:, None]
        else:
            bad = bad | from_state[self.sequences.index_of_token(o.device)]
        for name in local:
            if name in self.tokens:
                bad = bad | self._reached(name, self.tokens[name], 3)
        return _mark(o, bad)

    def mark_state(self, name: str, state: Tensor, names: Collection[str]) -> Tensor:
        """The final state [N, H, ...] with NaN wherever it depends on something bad among `names`."""
        seen = self._seen(names)
        if self.sequences.lengths is None:
            last = seen[:, -1] if seen.shape[1] else torch.zeros_like(seen[:, :0].any(1))
        else:
            lengths = torch.tensor(self.sequences.lengths, device=state.device)
            ends = lengths.cumsum(0) - 1
            last = seen[0][ends.clamp_min(0)] & (lengths > 0)[:, None, None] if seen.shape[1] else seen.new_zeros(1)
        bad = last | self._bad_states(names)
        if name not in self.columns:
            bad = bad.any(-1, keepdim=True)
        return _mark(state, bad.reshape(*bad.shape[:2], *[1] * (state.ndim - 3), bad.shape[-1]))


def _either(found: list[Tensor]) -> Tensor:
    bad = found[0]
    for other in found[1:]:
        bad = bad | other
    return bad


def _mark(x: Tensor, bad: Tensor) -> Tensor:
    """A product, so that a gradient through a bad output is NaN as well and does not pass for a good one."""
    return x * torch.where(bad, math.nan, 1.0).to(x.dtype)
