"""Some of the heads of a layer in one process, where several processes divide them (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["HeadPart"]


@dataclass(frozen=True)
class HeadPart:
    """Which of several equal parts of a layer a module belongs to. The outputs of the parts add up to the layer's output.

    Attributes:
        rank: number of this part, from 0.
        parts: how many parts there are.
        gather: concatenates the tensors [..., n] of all parts to [..., parts * n], in the order of their ranks.
        counts: how many heads and groups the whole layer has, by the names of the options that count them (`Mixer.head_counts`).
    """

    rank: int = 0
    parts: int = 1
    gather: Callable[[Tensor], Tensor] = lambda x: x
    counts: Mapping[str, int] = field(default_factory=dict)

    def span(self, option: str) -> int:
        """How many parts share one of what the option counts: 1 where each part has its own."""
        return max(1, self.parts // self.counts.get(option, self.parts))

    def gather_shared(self, x: Tensor, span: int) -> Tensor:
        """The tensors [..., n] of the `span` parts that share with this one, its own among them: [..., span, n]."""
        first = self.rank // span * span
        return self.gather(x).unflatten(-1, (self.parts, -1))[..., first : first + span, :]

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadPart:
        return self  # a process group cannot be copied
