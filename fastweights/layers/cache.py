"""The state of one layer between two calls, from which decoding continues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LayerCache", "check_memory"]


@dataclass
class LayerCache:
    """The state of one layer for N sequences, created empty and updated by the layer's forward.

    Every tensor has the sequence as its first dimension, whatever the layer, so a cache can be reordered, repeated or
    moved without knowing which layer it belongs to. A layer replaces the tensors and never writes into them, so that a
    tensor that is also used elsewhere keeps its values.

    Attributes:
        memory: the fast weights (S and, with a preconditioner, A), or the keys and values of softmax attention: what the
            layer's `state_size` counts.
        context: other tensors that the next call needs: the last inputs of the short convolutions, the number of tokens seen.
        rows: integer [N], for layers with `Mixer.decodes_in_pool`. The tensors of the memory and the context are then pools
            [P, ...], in which sequence n reads and overwrites row rows[n]. A negative row means no state. With [N, 1 + S]
            sequence n reads row rows[n, 0], and its states after each of at most S tokens go to the rows of the other columns,
            as the ops in place write them. None without a pool.
        fixed: whether the tensors keep their addresses and sizes: `keep` and `apply` write into them (`Mixer.fixed_cache`).
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    context: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rows: Tensor | None = None

    @property
    def count(self) -> int | None:
        """How many sequences the cache holds, None while it is empty."""
        if self.rows is not None:
            return len(self.rows)
        tensors = [*self.memory.values(), *self.context.values()]
        return len(tensors[0]) if tensors else None

    def copy(self) -> LayerCache:
        """Another cache of the same tensors."""
        return LayerCache({**self.memory}, {**self.context}, self.fixed, self.rows)

    def describe(self) -> list[tuple[str, torch.Size, torch.dtype, torch.device]]:
        """Name, shape, dtype and device of every tensor."""
        held = [*self.memory.items(), *self.context.items()]
        return [(name, x.shape, x.dtype, x.device) for name, x in sorted(held)]

    def update(self, memory: Mapping[str, Tensor | None], context: Mapping[str, Tensor]) -> None:
        """Replace the contents. Tensors of the memory that are None are left out."""
        self.memory = {name: tensor for name, tensor in memory.items() if tensor is not None}
        self.context = dict(context)

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by change(tensor)."""
        memory, context = ({name: change(x) for name, x in held.items()} for held in (self.memory, self.context))
        if self.fixed:
            self.keep(LayerCache(memory, context))
        else:
            self.memory, self.context = memory, context

    def has_form_of(self, other: LayerCache) -> bool:
        """Whether both have the same entries, of the same shapes and any dtypes."""
        return [one[:2] for one in self.describe()] == [one[:2] for one in other.describe()]

    def keep(self, after: LayerCache) -> None:
        """Copy the tensors of `after` into those of this fixed cache.

        Raises:
            RuntimeError: `after` has other entries, or one of another shape.
        """
        if not self.has_form_of(after):
            raise RuntimeError(
                f"a call must leave a fixed cache its entries and their shapes, {self.describe()}, and left "
                f"{after.describe()}; a layer whose memory grows defines fixed_cache"
            )
        for held, new in ((self.memory, after.memory), (self.context, after.context)):
            for name, x in held.items():
                if new[name] is not x:
                    x.copy_(new[name])


def check_memory(memory: Mapping[str, Tensor], names: Collection[str]) -> None:
    """ValueError where a cache holds the memory of another kind of layer. An empty memory is the start of the sequences."""
    if memory and not all(name in memory for name in names):
        raise ValueError(
            f"cache must be one that this layer has filled, with the memory {', '.join(names)}, got one with "
            f"{', '.join(memory)}; start with an empty cache"
        )
