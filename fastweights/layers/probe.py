"""Intermediate results of the layers by name: gates, decays, keys, write keys, states over time.

with probe(model, "beta", "write_key", "state") as seen:
    model(tokens)
seen["beta"][0]  # [B, T, heads], of the first layer
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_size, check_texts, closest
from .cache import LayerCache
from .mixer import Mixer

__all__ = ["Seen", "probe", "read_states"]


class Seen(dict[str, dict[int, Any]]):
    """What a probe has recorded: `seen[name][layer]`, with the mixers of the model counted from 0 in their order.

    Under a name there are only the layers that have it. Values are tensors [B, T, ...] ("ridge" is [heads, K]). "state" is a
    dict of tensors [B, P, ...] by name, after each of the P numbers of tokens in `ends`.

    Attributes:
        layers: module names of the mixers, in order.
        ends: number of tokens of the row before each state was recorded.
    """

    def __init__(self, names: tuple[str, ...], layers: list[str]) -> None:
        super().__init__({name: {} for name in names})
        self.layers = layers
        self.ends: list[int] = []


@contextmanager
def probe(model: nn.Module, *names: str, every: int = 64, detach: bool = True) -> Iterator[Seen]:
    """Record intermediate results of every mixer of `model` in the calls within the `with` block.

    Every layer has q, k and v as its rule gets them, and the memory's answer o. Depending on the layer there are also g (log
    decay), beta (gain of a write), write_key, read_key, mix, step_size, importance, precond_g, precond_beta,
    penalty_direction, ridge, output_gate, and state: the memory after every `every` tokens and after the last
    one. A call replaces the records of the call before it. Packed rows are recorded packed, with the states at the ends of
    pieces of `every` tokens of each sequence. A model packs padded rows.

    A model that torch.compile has compiled runs eagerly within the block. Outside the block nothing is computed for probes.
    For the states the input is read a second time, in pieces. Other names cost only the memory that holds them, except
    output_gate and those write keys that the rule forms inside, which are computed again (for rls and vla from the state after
    each token).

    Args:
        model: a model, or a single layer.
        names: what to record.
        every: number of tokens between two states; 1 gives the state after each token.
        detach: whether the recorded tensors are cut from the autograd graph. With False, gradients flow into them; states
            then belong to their second reading.

    Raises:
        TypeError: model is not a module, or a name not a string.
        ValueError: a name that no layer of the model has, no name, a model without mixers, or one with another open probe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module with mixers, got {type(model).__name__}")
    check_texts("names", names)
    mixers = [(name, module) for name, module in model.named_modules() if isinstance(module, Mixer)]
    if not mixers:
        raise ValueError(f"model must contain a fastweights.layers.Mixer, got {type(model).__name__} without one")
    shown = list(dict.fromkeys(name for _, mixer in mixers for name in mixer.probe_names()))
    if not names:
        raise ValueError(f"names must be given; the layers of the model show {', '.join(shown)}")
    for name in names:
        if name not in shown:
            raise ValueError(
                f"no layer of the model shows {name!r}{closest(name, shown)}; they show {', '.join(shown)}"
            )
    if any(mixer._listener is not None for _, mixer in mixers):
        raise ValueError("model is open to another probe; give one probe all names")
    check_size("every", every)
    check_flag("detach", detach)
    seen = Seen(names, [name for name, _ in mixers])
    hooks = []
    try:
        for index, (_, mixer) in enumerate(mixers):
            mixer._listener = _listener(seen, index, detach)
            if "state" in names and "state" in mixer.probe_names():
                hook = _state_reader(seen, index, every, detach)
                hooks.append(mixer.register_forward_pre_hook(hook, with_kwargs=True))
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for hook_handle in hooks:
            hook_handle.remove()
        for _, mixer in mixers:
            mixer.__dict__.pop("_listener", None)


def _listener(seen: Seen, index: int, detach: bool) -> Callable[[dict[str, Any]], None]:
    def record(internals: dict[str, Any]) -> None:
        for name in seen.keys() & internals.keys():
            value = internals[name]
            value = value() if callable(value) else value
            if value is not None:
                seen[name][index] = value.detach() if detach else value

    return record


def _state_reader(seen: Seen, index: int, every: int, detach: bool) -> Callable[..., None]:
    def read(mixer: Mixer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = inspect.signature(mixer.forward).bind(*arguments, **keywords)
        given.apply_defaults()
        x_BTD, cache, cu_seqlens, *_ = given.arguments.values()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            seen.ends, seen["state"][index] = read_states(mixer, x_BTD, cache, cu_seqlens, every)

    return read


def read_states(
    mixer: Mixer, x_BTD: Tensor, cache: LayerCache | None, cu_seqlens: Tensor | None, every: int
) -> tuple[list[int], dict[str, Tensor]]:
    """Read x in pieces of `every` tokens: their ends, and the memory after each [B, P, ...] by name.

    Sequences begin from `cache`, which stays as it is. Nothing of this reading goes to an open probe.
    """
    listener, mixer._listener = mixer._listener, None
    try:
        return _read_in_pieces(mixer, x_BTD, cache, cu_seqlens, every)
    finally:
        mixer._listener = listener


def _read_in_pieces(
    mixer: Mixer, x_BTD: Tensor, cache: LayerCache | None, cu_seqlens: Tensor | None, every: int
) -> tuple[list[int], dict[str, Tensor]]:
    edges = [0, x_BTD.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    ends: list[int] = []
    memories: list[dict[str, Tensor]] = []
    for sequence, (begin, end) in enumerate(pairwise(edges)):
        own = LayerCache() if cache is None else LayerCache(dict(cache.memory), dict(cache.context))
        if cu_seqlens is not None:
            own.apply(itemgetter(slice(sequence, sequence + 1)))
        for start in range(begin, end, every):
            ends.append(min(start + every, end))
            mixer.forward(x_BTD[:, start : ends[-1]], own)
            memories.append(own.memory)
    if any(memory[name].shape != memories[0][name].shape for memory in memories for name in memories[0]):
        raise ValueError(
            f"state of {type(mixer).__name__} changes its shape from token to token; probe its other names"
        )
    return ends, {name: torch.stack([memory[name] for memory in memories], 1) for name in memories[0]}
