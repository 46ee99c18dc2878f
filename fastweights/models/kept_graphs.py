"""CUDA graphs of a model that outlive the call of `generate()` that captured them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from threading import Lock
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..layers.mixer import Mixer
from ..private_torch import all_modules, change_count, product_precision, tensors_of

__all__ = ["Kept", "KeptGraphs", "describe_model", "graphs_of", "kind_of_call", "may_refuse_packed"]

MOST = 12  # graphs per model
SHARE = 1 / 32  # of the GPU's memory that those of a model may hold
PLAIN = frozenset({int, float, str, bool, type(None)})  # settings of a module that its forward may read
# Where the modules come from whose plain settings and options are all there is to them.
KNOWN = ("fastweights.", "torch.nn.")
WHOLE = (Enum, torch.dtype, torch.device, torch.Size, type, FunctionType, BuiltinFunctionType)  # compared as they are
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in every module


class Kept(Protocol):
    """A captured call, with everything that its replays read and write."""

    @property
    def key(self) -> Hashable:
        """`describe_model` when it was captured."""

    @property
    def serves(self) -> Hashable:
        """What it reads: the kind of call, sizes and device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes(self) -> int:
        """Memory that it holds."""


class KeptGraphs:
    """The captured calls that are kept for one model, the latest last. One in use is not among them, so that no two calls of
    `generate()` replay the same one. All are of one state of the model."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._kept: list[Any] = []
        self._refused: set[Hashable] = set()
        self._alone = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept)

    def take(self, key: Hashable, serves: Hashable) -> Any:
        """The captured call that serves this one, or None. Those of another state of the model are dropped."""
        with self._alone:
            self._of_state(key)
            for place, kept in reversed([*enumerate(self._kept)]):
                if kept.serves == serves:
                    return self._kept.pop(place)
        return None

    def put(self, kept: Kept) -> bool:
        """Keep a captured call, in place of the oldest where they are too many or too large. False where it is too large itself,
        or the model has changed meanwhile."""
        most = most_bytes(kept.device)
        with self._alone:
            if kept.bytes > most or kept.key != self._key:
                return False
            self._kept.append(kept)
            while len(self._kept) > MOST or self.bytes > most:
                self._kept.pop(0)
        return True

    def refuse(self, serves: Hashable) -> None:
        """Such a call cannot be captured or kept in this state of the model."""
        with self._alone:
            self._refused.add(serves)

    def refuses(self, serves: Hashable) -> bool:
        return serves in self._refused

    def clear(self) -> None:
        with self._alone:
            self._of_state(None)

    def _of_state(self, key: Hashable) -> None:
        if key != self._key:
            self._key, self._kept, self._refused = key, [], set()


_graphs: WeakKeyDictionary[nn.Module, KeptGraphs] = WeakKeyDictionary()  # not in the model, which is copied and pickled


def graphs_of(model: nn.Module) -> KeptGraphs:
    return _graphs.setdefault(model, KeptGraphs())


def kind_of_call(kind: str, *sizes: Hashable) -> Hashable:
    """What a captured call serves: the kind of call, what it reads, and whether it is made in inference mode, whose tensors
    cannot be written into outside."""
    return kind, *sizes, torch.is_inference_mode_enabled()


def most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 30
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory)


def describe_model(model: nn.Module) -> tuple[object, ...] | None:
    """What a captured call depends on: the places and versions of all weights, every plain setting and the options of every
    module of this library, and everything that a mixer from elsewhere and the modules within it hold. None where these do not
    tell all: other modules of other packages (adapters, quantized layers), tensors of other classes or without a version, and a
    mixer that holds anything but tensors, plain values, and containers and dataclasses of them."""
    modules = all_modules(model)
    kinds = [*map(type, modules)]
    strange = _from_elsewhere(modules)
    own = {part for mixer in strange if isinstance(mixer, Mixer) for part in all_modules(mixer)}
    if not own.issuperset(strange):
        return None
    tensors = [x for module in modules for x in tensors_of(module)]
    if not all(map(_is_versioned, tensors)):
        return None
    settings = [x for module in modules for x in vars(module).values() if type(x) in PLAIN]
    options = [vars(module).get("options") for module in modules if module not in own]
    try:
        held = [_describe_held(part) for part in modules if part in own]
    except Incomparable:
        return None
    products = torch.backends.cuda.matmul
    return (
        *kinds,
        *settings,
        options,
        held,
        *[(x.data_ptr(), change_count(x), x.dtype) for x in tensors],
        product_precision(),
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def may_refuse_packed(model: nn.Module, error: Exception) -> bool:
    """Whether an error of tokens that are packed into one row, with padding behind them, need not come without that: memory does
    not hold it, or a mixer from elsewhere may not take them so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(isinstance(module, Mixer) for module in _from_elsewhere(all_modules(model)))


def _from_elsewhere(modules: Sequence[nn.Module]) -> list[nn.Module]:
    kinds = {kind for kind in {*map(type, modules)} if not kind.__module__.startswith(KNOWN)}
    return [module for module in modules if type(module) in kinds] if kinds else []


def _is_versioned(x: Tensor) -> bool:
    """Whether its place and version tell whether a tensor has changed."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_inference()
    return is_plain and change_count(x) is not None


class Incomparable(Exception):
    """A value of a kind of which equality says too little."""


def _describe_held(module: nn.Module) -> object:
    return [(name, _describe(x)) for name, x in vars(module).items() if name not in OF_MODULES]


def _describe(x: Any) -> object:
    """A value that is equal while a forward that reads x computes the same."""
    if type(x) in PLAIN or isinstance(x, WHOLE):
        return x
    if isinstance(x, Tensor):
        if not _is_versioned(x):
            raise Incomparable
        return x.data_ptr(), change_count(x), x.dtype, x.shape, x.stride(), x.device
    if isinstance(x, Mapping):
        return type(x), [(_describe(name), _describe(value)) for name, value in x.items()]
    if isinstance(x, (tuple, list)):
        return type(x), [_describe(one) for one in x]
    if is_dataclass(x):
        return type(x), [(each.name, _describe(getattr(x, each.name))) for each in fields(x)]
    raise Incomparable
