"""The interface of every sequence mixer, whatever its memory: forward, state size, named internals, options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from ..ops.framework.sequences import check_cu_seqlens
from .cache import LayerCache
from .options import MixerOptions

__all__ = ["ConfiguredMixer", "Mixer", "check_input"]


class Mixer(nn.Module):
    """A causal map of sequences of hidden states, with a memory that can be carried from call to call.

    Attributes:
        probes: names that `fastweights.layers.probe` takes for this class. The value is the attribute that is None where a
            layer does without (such as "decay" for the name "g"), or "" where every layer of the class has it.
    """

    probes: ClassVar[Mapping[str, str]] = {"state": ""}
    _listener: Callable[[dict[str, Any]], None] | None = None

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix along time.

        Args:
            x_BTD: hidden states [B, T, D], T >= 1.
            cache: empty, or of an earlier call whose sequences x continues; brought up to date. None starts anew.
            cu_seqlens: int32 or int64 [N+1], cumulative lengths of N sequences packed into one row (B = 1). They do not see
                each other; a cache then holds N sequences.

        Returns:
            y [B, T, D] in the layer's dtype.

        Raises:
            TypeError: x is no tensor.
            ValueError: an input that does not fit.
        """
        raise NotImplementedError

    def state_size(self, length: int = 1) -> int:
        """Numbers that the memory of one sequence holds after `length` tokens. The few inputs that short convolutions keep
        are not counted."""
        raise NotImplementedError

    def probe(self, **internals: Tensor | Callable[[], Tensor | None] | None) -> None:
        """Show intermediate results by name to an open `fastweights.layers.probe`; without one this does nothing.

        A function is called only if its name was asked for. None stands for a result that this layer does without.
        """
        if self._listener is not None:
            self._listener(internals)

    def probe_names(self) -> list[str]:
        """The names of `probes` that this layer, with its options, shows."""
        return [name for name, needed in self.probes.items() if not needed or attrgetter(needed)(self) is not None]


class ConfiguredMixer(Mixer):
    """A mixer whose constructor takes the fields of its `Options` as keywords and keeps them as `layer.options`."""

    Options: ClassVar[type[MixerOptions]] = MixerOptions
    __signature__: ClassVar[inspect.Signature]
    options: MixerOptions

    def __init_subclass__(cls, **extra: Any) -> None:
        super().__init_subclass__(**extra)
        if "Options" in vars(cls):
            cls.__signature__ = cls.Options.signature()
        elif "__init__" in vars(cls):
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = self.Options.from_keywords(type(self).__name__, options)
        self.hidden_size = self.options.hidden_size


def check_input(x_BTD: object, hidden_size: int, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
    """Check the arguments of a mixer's forward."""
    if not isinstance(x_BTD, Tensor):
        raise TypeError(f"x must be a tensor [batch, time >= 1, {hidden_size}], got {type(x_BTD).__name__}")
    if x_BTD.ndim != 3 or x_BTD.shape[2] != hidden_size or x_BTD.shape[1] < 1:
        raise ValueError(f"x must be a tensor [batch, time >= 1, {hidden_size}], got {list(x_BTD.shape)}")
    count = check_cu_seqlens(cu_seqlens, x_BTD.shape[0], x_BTD.shape[1]).count
    if cache is not None and cache.count not in (None, count):
        raise ValueError(
            f"cache must hold as many sequences as the input, {count}, got {cache.count}; "
            "start an empty cache for other sequences"
        )
