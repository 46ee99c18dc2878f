"""What a model that is divided over processes would send, before there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..framework import checks

if TYPE_CHECKING:
    from ..framework.spec import OpSpec

__all__ = ["PlannedGroup", "call_nothing"]


class PlannedGroup:
    """Stands for a process group that is not there, as its first process. A model on the device "meta" that is divided over it
    notes what one process sends.

    Attributes:
        sent: bytes by the name of the collective.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.group_name = f"planned {size}"
        self.sent: Counter[str] = Counter()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def note(self, collective: str, tensors: Sequence[Tensor]) -> None:
        """A collective of these tensors: of a gather every other process gets all, else its part."""
        others = self._size - 1
        share = others if collective == "all_gather" else others / self._size
        self.sent[collective] += round(share * sum(x.nbytes for x in tensors))


def call_nothing(
    spec: OpSpec, inputs: Sequence[Any], options: Mapping[str, Any], initial_state: Any, output_final_state: bool,
    cu_seqlens: Tensor | None, backend: str,
) -> tuple[Any, Any]:  # fmt: skip
    """As `framework.call.call`, without the numbers: tensors on the device "meta" whatever their length."""
    sizes = checks.check_inputs(spec, inputs)
    like, count = inputs[0], sizes.B if cu_seqlens is None else len(cu_seqlens) - 1
    outputs = [like.new_empty(sizes.B, sizes.T, *sizes.shape(output.dims)) for output in spec.outputs.values()]
    states = [checks.first_state(spec, name, sizes, count, like) for name in spec.states]
    return tuple(outputs), tuple(states) if output_final_state else None
