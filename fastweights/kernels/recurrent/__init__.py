"""A few tokens without gradients: a state is read once, updated in registers token by token, and written once
or, where each token has a row for it, after each.

One file per rule, whose `decode` takes a `RecurrentCall`, checks nothing and returns the outputs, one tensor or a tuple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..common.rows import rows_per_sequence

__all__ = ["RecurrentCall"]


class RecurrentCall(NamedTuple):
    """inputs: tensors by name, of any layout. states: float32 [N, HV, ...] by name, or pools [P, HV, ...]. options: by name.
    new_states: where the states after the last token go, by name; into the states themselves when None. cu_seqlens: on the
    device of the inputs. state_indices: on the same device, the row of the pool that each sequence has; a negative index is
    none, and the outputs of its sequence are zeros. With [N, 1 + S] that of the first column is read, and the state after token
    t goes to the row of column 1 + t, if it has one."""

    inputs: Mapping[str, Any]
    states: Mapping[str, Tensor]
    options: Mapping[str, Any]
    new_states: Mapping[str, Tensor] | None = None
    cu_seqlens: Tensor | None = None
    state_indices: Tensor | None = None

    def new_output(self) -> Tensor:
        """For the answers [B, T, HV, V], in the shape and dtype of the values."""
        return self.inputs["v"].new_empty(self.inputs["v"].shape)

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(next(iter(self.states.values())) if self.state_indices is None else self.state_indices)

    @property
    def rows_per_sequence(self) -> int:
        return rows_per_sequence(self.state_indices)

    def take_read(self, pool: Tensor) -> Tensor:
        """What sequences read of a pool [P, ...], in copies [N, ...]; of no sequence any numbers."""
        assert self.state_indices is not None
        rows = self.state_indices if self.rows_per_sequence == 1 else self.state_indices[:, 0]
        return pool[rows.clamp(0, len(pool) - 1)]
