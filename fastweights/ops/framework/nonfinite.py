"""NaN and infinity stay where they belong. A matrix product over a chunk would carry them to every token of the chunk
(0 * NaN = NaN). So they are replaced by zeros before the computation, and results that depend on them are made NaN after it.

How far a nonfinite number reaches is said by the role of its input (`Role.reaches`) and by the states of the op.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ...checks import values_can_be_read
from .sequences import Sequences
from .spec import OpSpec, Role

Named = Mapping[str, Tensor]


def is_nonfinite(x: Tensor, role: object = None) -> Tensor:
    nonfinite = ~x.isfinite()
    return nonfinite & (x != -math.inf) if isinstance(role, Role) and role.minus_inf else nonfinite


def zero_nonfinite(spec: OpSpec, named: Named) -> dict[str, Tensor]:
    return {name: x.masked_fill(is_nonfinite(x, spec.inputs.get(name)), 0.0) for name, x in named.items()}


def quarantine_is_needed(spec: OpSpec, tokens: Named, states: Named) -> bool:
    """Whether any number is not finite; assumed where looking would wait for the device."""
    pairs = [*tokens.items(), *states.items()]
    if not all(values_can_be_read(x) for _, x in pairs):
        return True
    return any(is_nonfinite(x, spec.inputs.get(name)).any() for name, x in pairs)


class Quarantine:
    """Where nonfinite numbers are in the inputs of one call, and what they reach.

    tokens: [B, T, G, ...] by name; states: [N, G, ...] by name. A number that reaches a column stays in the column of the
    output that it is in; one that reaches a head spreads to all columns."""

    def __init__(self, spec: OpSpec, tokens: Named, states: Named, sequences: Sequences) -> None:
        self.spec, self.sequences = spec, sequences
        self.tokens = {name: is_nonfinite(x, spec.inputs[name]) for name, x in tokens.items()}
        self.states = {name: ~x.isfinite() for name, x in states.items()}
        self.token_only = [name for name in tokens if self._reach(name) == "token"]
        self.lasting = [name for name in (*tokens, *states) if name not in self.token_only]

    def _reach(self, name: str) -> str:
        if name in self.states:
            return "column" if self.spec.states[name].by_column else "head"
        role = self.spec.inputs[name]
        return role.reaches if isinstance(role, Role) else "head"

    def _find_in_states(self, names: Collection[str]) -> Tensor:
        """[N, G, 1 or columns]: initial states among `names` that hold a nonfinite number."""
        return _unite([self._spread(name, bad, 2) for name, bad in self.states.items() if name in names])

    def _spread(self, name: str, bad: Tensor, heads: int) -> Tensor:
        """Nonfinite elements of one input, whose first `heads` dimensions end with the heads -> what they reach,
        [..., heads, 1 or columns]."""
        bad = bad[..., None] if bad.ndim == heads else bad
        if self._reach(name) == "column":
            return bad.flatten(heads, -2).any(heads) if bad.ndim > heads + 1 else bad
        return bad.flatten(heads).any(-1, keepdim=True)

    def _find_seen(self, names: Collection[str]) -> Tensor:
        """[B, T, G, 1 or columns]: a token at or before this one, in its sequence, holds a nonfinite number."""
        bad = _unite([self._spread(name, bad, 3) for name, bad in self.tokens.items() if name in names])
        counts = bad.cumsum(1)
        if self.sequences.lengths is not None:
            before = (counts - bad.long())[0]
            lengths = torch.tensor(self.sequences.lengths, device=bad.device)
            first = (lengths.cumsum(0) - lengths).clamp_max(max(self.sequences.time - 1, 0))
            counts = counts - before[first[self.sequences.index_of_token(bad.device)]]
        return counts > 0

    def mark(self, name: str, x: Tensor) -> Tensor:
        """An output or a final state, NaN wherever it depends on a nonfinite number."""
        if name in self.spec.states:
            return self._mark_state(name, x, self.spec.states[name].depends_on or self.lasting)
        return self._mark_output(x, self.spec.outputs[name].depends_on or self.lasting)

    def _mark_output(self, o: Tensor, names: Collection[str]) -> Tensor:
        """o [B, T, G, columns], by the inputs and states among `names`, and those that reach their own token only."""
        bad = self._find_seen(names)
        from_state = self._find_in_states(names)
        if self.sequences.lengths is None:
            bad = bad | from_state[:, None]
        else:
            bad = bad | from_state[self.sequences.index_of_token(o.device)]
        for name in self.token_only:
            bad = bad | self._spread(name, self.tokens[name], 3)
        return _mark(o, bad)

    def _mark_state(self, name: str, state: Tensor, names: Collection[str]) -> Tensor:
        """The final state [N, G, ...], by the inputs and states among `names`."""
        seen = self._find_seen(names)
        if self.sequences.lengths is None:
            last = seen[:, -1] if seen.shape[1] else torch.zeros_like(seen[:, :0].any(1))
        else:
            lengths = torch.tensor(self.sequences.lengths, device=state.device)
            ends = lengths.cumsum(0) - 1
            last = seen[0][ends.clamp_min(0)] & (lengths > 0)[:, None, None] if seen.shape[1] else seen.new_zeros(1)
        bad = last | self._find_in_states(names)
        if self._reach(name) == "head":
            bad = bad.any(-1, keepdim=True)
        return _mark(state, bad.reshape(*bad.shape[:2], *[1] * (state.ndim - 3), bad.shape[-1]))


def _unite(found: list[Tensor]) -> Tensor:
    bad = found[0]
    for other in found[1:]:
        bad = bad | other
    return bad


def _mark(x: Tensor, bad: Tensor) -> Tensor:
    """A product, so that a gradient through a NaN output is NaN as well: a finite one would pass for right."""
    return x * torch.where(bad, math.nan, 1.0).to(x.dtype)
