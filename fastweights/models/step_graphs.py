"""Captured steps of decoding that outlive the call of `generate()` that captured them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..layers import LayerCache
from ..layers.mixer import Mixer
from ..private_torch import change_count

__all__ = ["KeptStep", "StepGraphs", "describe_model", "graphs_of"]

MOST = 4  # graphs per model
SHARE = 1 / 32  # of the GPU's memory that those of a model may hold
PLAIN = (int, float, str, bool, type(None))  # settings of a module that its forward may read
KNOWN = ("fastweights.", "torch.nn.")  # where the modules come from whose settings are all there is to them


class KeptStep(NamedTuple):
    """A captured step, with everything that its replays read and write.

    Attributes:
        key: `describe_model` when it was captured.
        graph: None where steps are called (on a CPU, in tests).
        ids: [N, 1], the token ids that a replay reads.
        logits: [N, 1, vocab_size], what it writes.
        layers: the fixed caches that it reads and overwrites.
        bytes: memory that these and the graph hold.
    """

    key: tuple[object, ...]
    graph: torch.cuda.CUDAGraph | None
    ids: Tensor
    logits: Tensor
    layers: list[LayerCache]
    bytes: int


class StepGraphs:
    """The steps that are kept for one model, the latest last. A step in use is not among them, so that no two calls of
    `generate()` replay the same one."""

    def __init__(self) -> None:
        self._kept: list[KeptStep] = []
        self._alone = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self._kept)

    def take(self, key: tuple[object, ...], ids: Tensor) -> KeptStep | None:
        """A step for token ids of this shape. Those captured from another state of the model are dropped."""
        with self._alone:
            self._kept = [step for step in self._kept if step.key == key]
            for place, step in reversed([*enumerate(self._kept)]):
                if step.ids.shape == ids.shape and step.ids.device == ids.device:
                    return self._kept.pop(place)
        return None

    def put(self, step: KeptStep) -> bool:
        """Keep a step, in place of the oldest where they are too many or too large. False where it is too large itself."""
        most = most_bytes(step.ids.device)
        if step.bytes > most:
            return False
        with self._alone:
            self._kept.append(step)
            while len(self._kept) > MOST or self.bytes > most:
                del self._kept[0]
        return True

    def clear(self) -> None:
        with self._alone:
            self._kept = []


_graphs: WeakKeyDictionary[nn.Module, StepGraphs] = WeakKeyDictionary()  # not in the model, which is copied and pickled


def graphs_of(model: nn.Module) -> StepGraphs:
    return _graphs.setdefault(model, StepGraphs())


def most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 30
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory)


def describe_model(model: nn.Module) -> tuple[object, ...] | None:
    """What a captured step depends on: the places and versions of all weights, and every plain setting of every module. None
    where these do not tell all: modules of other packages (adapters, quantized layers), but for mixers, and tensors of other
    classes or without a version."""
    modules = [*model.modules()]
    tensors = [*chain(model.parameters(), model.buffers())]
    if not all(type(module).__module__.startswith(KNOWN) or isinstance(module, Mixer) for module in modules):
        return None
    if any(type(x) not in (Tensor, nn.Parameter) or x.is_inference() or change_count(x) is None for x in tensors):
        return None
    products = torch.backends.cuda.matmul
    return (
        *[(x.data_ptr(), change_count(x), x.dtype) for x in tensors],
        *chain.from_iterable(map(plain_settings, modules)),
        torch.get_float32_matmul_precision(),
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def plain_settings(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    yield from (x for x in vars(module).values() if type(x) in PLAIN)
