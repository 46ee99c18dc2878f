"""Calls of a few tokens without gradients: one recurrent kernel reads them one after another, in the place of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ...kernels.recurrent import RecurrentCall
from .checks import Sizes, as_tuple, expand_parameter, first_state
from .node import load_module
from .spec import OpSpec

__all__ = ["defer_decode", "needs_gradient", "overwriting_states", "overwrites_states", "recurrent"]

_overwrites = ContextVar("overwrites", default=False)


@contextmanager
def overwriting_states() -> Iterator[None]:
    """In the body, a recurrent kernel writes the final states over the initial states, which spares a copy. For callers that own
    the initial states and no longer need them."""
    token = _overwrites.set(True)
    try:
        yield
    finally:
        _overwrites.reset(token)


def overwrites_states() -> bool:
    """Whether the call stands in the body of `overwriting_states`."""
    return _overwrites.get()


def defer_decode(module: str, function: str = "decode") -> Callable[[], Callable[[RecurrentCall], Any]]:
    """A loader for `recurrent`: it imports the function from a module of fastweights.kernels.recurrent."""
    return lambda: getattr(load_module(f"recurrent.{module}"), function)


@dataclass(eq=False)
class recurrent:
    """The recurrent kernel of an op, with or without kernels for long sequences. Calls that it does not take go to a backend.

    Args:
        load: imports the function `decode` of a file of kernels.recurrent. It is called at the first launch: before, nothing of
            triton is imported.
        only: for options of which the kernel has some values only, these values.
        without: inputs that the kernel does not take.
        widest: the most key channels that it takes; None for no limit.
        starts: whether it can begin without an initial state.
        numbers: parameters that it also takes as numbers, which spares the launch that fills a tensor.
    """

    load: Callable[[], Callable[[RecurrentCall], Any]]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without: Sequence[str] = ()
    widest: int | None = None
    starts: bool = True
    numbers: Sequence[str] = ()

    @cached_property
    def decode(self) -> Callable[[RecurrentCall], Any]:
        return self.load()

    def bind(self, spec: OpSpec) -> None:
        self.spec = spec

    def takes(self, inputs: Mapping[str, Any], options: Mapping[str, Any], key: int) -> bool:
        """Whether the kernel takes these inputs, these options and `key` key channels."""
        has_form = all(options[name] in served for name, served in self.only.items())
        has_form = has_form and all(inputs[name] is None for name in self.without)
        return has_form and (self.widest is None or key <= self.widest)

    def parameter(self, name: str, x: Any, sizes: Sizes, like: Tensor) -> Any:
        """The parameter as the kernel takes it: a number where it may be one, else a tensor of its full shape and any dtype."""
        if name in self.numbers and not isinstance(x, Tensor):
            return x
        return expand_parameter(x, self.spec.parameters[name], sizes, like, converts=False)

    def serves(
        self, backend: str, inputs: Mapping[str, Any], options: Mapping[str, Any], key: int, started: bool
    ) -> bool:  # fmt: skip
        """Whether the kernel runs for these few tokens, outside torch.compile, where they need no gradient."""
        if backend not in ("auto", "triton"):
            return False
        if not (self.starts or started) or not self.takes(inputs, options, key):
            return False
        return takes_kernels(backend, next(iter(inputs.values())))

    def run(self, x: Any, sizes: Sizes) -> tuple[Sequence[Any], Sequence[Any]]:
        """The outputs and the final states of checked `Arguments`. Given states are kept unless `overwriting_states`."""
        like, cu_seqlens = next(iter(x.inputs.values())), x.cu_seqlens
        before: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for name, given in x.states.items():
            if given is None:  # the first state is updated in place
                count = sizes.B if cu_seqlens is None else len(cu_seqlens) - 1
                before[name] = after[name] = first_state(self.spec, name, sizes, count, like).contiguous()
            else:
                kept = not (_overwrites.get() and given.is_contiguous())
                before[name], after[name] = given, given.new_empty(given.shape) if kept else given
        outputs = self.decode(RecurrentCall(x.inputs, before, x.options, after, move_lengths(cu_seqlens, like)))
        return as_tuple(outputs), tuple(after.values())


def move_lengths(cu_seqlens: Tensor | None, like: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(like.device, non_blocking=True)


def needs_gradient(*named: Mapping[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for tensors in named for x in tensors.values()
    )
