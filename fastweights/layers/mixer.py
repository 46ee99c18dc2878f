"""The interface of every sequence mixer, whatever its memory: forward, state size, named internals, options."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import FLOATS, check_dense, check_dtype, check_size, check_whole_number, shape_of
from ..ops.authoring import ContextParallel, check_columns, check_cu_seqlens
from ..private_huggingface import execution_device, is_placed, placement_hooks, remove_placement
from .cache import LayerCache
from .options import MixerOptions
from .parts import HeadPart

__all__ = ["ConfiguredMixer", "Mixer", "check_input", "token_of"]

LONG = 2**40  # tokens: longer than any sequence


class Mixer(nn.Module):
    """A causal map of sequences of hidden states, with a memory that can be carried from call to call.

    Attributes:
        probes: names that `fastweights.layers.probe` can record for this class. The value is the attribute that is None where
            the options of a layer leave it out (such as "decay" for the name "g"), or "" where every layer of the class has it.
        gives_values, takes_first_values: whether the method `values` gives what layers behind this one take as the keyword
            `first_values` of their forward, and whether this layer's forward takes it.
        decodes_in_pool: whether forward can read a few tokens with a cache whose memory is a pool, with either form of
            `LayerCache.rows`, as every layer does that passes the rows on to `RuleCall` and its projections.
        serves_context_parallel: whether forward may get one rank's part of the tokens: it passes `cp_keywords` on to every op,
            convolution and `RuleCall`, and nothing else of it looks across tokens. A class that defines forward says it anew.
        cp_group: the ranks that each have a part of the tokens, set by `fastweights.distributed.context_parallel`; None where
            forward gets whole sequences. cu_seqlens are always those of the whole row.
        head_counts: names of the options that count heads, first those that have a memory each. Where processes divide the
            heads, each has its share of these. Of the others it has its share, or one that it shares with other processes.
    """

    probes: ClassVar[Mapping[str, str]] = {"state": ""}
    gives_values: bool = False
    takes_first_values: bool = False
    decodes_in_pool: bool = False
    serves_context_parallel: bool = False
    cp_group: ContextParallel | None = None
    head_counts: ClassVar[tuple[str, ...]] = ("num_heads", "num_v_heads", "num_kv_heads")
    _listener: Callable[[dict[str, Any]], None] | None = None

    def __init_subclass__(cls, **extra: Any) -> None:
        super().__init_subclass__(**extra)
        if "forward" in vars(cls) and "serves_context_parallel" not in vars(cls):
            cls.serves_context_parallel = False
        if "state_size" in vars(cls):
            cls.state_size = _with_checked_length(cls.state_size)  # type: ignore[method-assign, assignment]  # one check for all

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix along time.

        Args:
            x_BTD: hidden states [B, T, D], T >= 1.
            cache: empty, or filled by an earlier call whose sequences x continues; updated in place. With None sequences start
                without a past.
            cu_seqlens: int32 or int64 [N+1], cumulative lengths of N sequences packed into one row (B = 1). The
                sequences do not see each other. A cache then holds N sequences.

        Returns:
            y [B, T, D] in the layer's dtype.

        Raises:
            TypeError: x is not a tensor, or cache not a `LayerCache`.
            ValueError: an input that does not fit: its shape, or a dtype or device that is not the layer's.
        """
        raise NotImplementedError

    def values(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """`first_values` for the layers behind this one, before forward has brought the cache up to date."""
        raise NotImplementedError

    @property
    def cp_keywords(self) -> dict[str, Any]:
        """Keywords for ops, convolutions and `RuleCall`: `cp_group` where each rank has a part of the tokens, else nothing."""
        return {} if self.cp_group is None else {"cp_group": self.cp_group}

    def cache_of_first(self, cache: LayerCache, count: int, tokens: int, same_length: bool) -> LayerCache:
        """The cache of the first `count` sequences alone, in tensors of its own. Each has read at most `tokens` tokens, and
        exactly so many where they have the same length."""
        first = cache.copy()
        first.apply(lambda x: x[:count].clone())
        return first

    def fixed_cache(self, cache: LayerCache, tokens: int) -> LayerCache:
        """A copy of a cache for `tokens` calls of one token per sequence. Its tensors keep their addresses and sizes, so that a
        CUDA graph can use them. A call replaces the tensors of a `LayerCache`; `LayerCache.keep` copies them back."""
        memory, context = (
            {name: x.clone(memory_format=torch.contiguous_format) for name, x in held.items()}
            for held in (cache.memory, cache.context)
        )
        return LayerCache(memory, context, fixed=True)

    def slotted_cache(self, cache: LayerCache, slots: int) -> LayerCache | None:
        """A cache of one sequence whose tensors keep their sizes until the sequence has more than `slots` tokens: calls replace
        them by others of the same sizes. None where the layer has no such cache."""
        return None if self.grows() else cache

    def refill_cache(self, kept: LayerCache, fixed: LayerCache) -> bool:
        """Copy a fixed cache into another one of this layer that a CUDA graph uses. False where it does not fit."""
        fits = kept.describe() == fixed.describe()
        if fits:
            kept.keep(fixed)
        return fits

    def free_cache(self, cache: LayerCache) -> LayerCache:
        """The ordinary cache at the point that a fixed one has reached. It holds the same tensors."""
        return LayerCache(cache.memory, cache.context)

    def state_size(self, length: int = 1) -> int:
        """Numbers that the memory of one sequence holds after `length` tokens. The few inputs that short convolutions keep
        are not counted."""
        raise NotImplementedError

    def grows(self) -> bool:
        """Whether the memory of a sequence grows with its length."""
        return self.state_size(1) != self.state_size(LONG)

    def state_spec(self, dtype: torch.dtype | None = None) -> LayerCache:
        """The cache of one sequence without its values: tensors [1, ...] on the device "meta" with the names, shapes and dtypes
        of the cache. Nothing is computed.

        Args:
            dtype: dtype of the parameters and inputs; that of the layer when None.

        Raises:
            TypeError: dtype is not a torch.dtype.
            ValueError: dtype is not a floating-point one, the memory grows with the sequence, or the layer has no attribute
                `hidden_size`.
        """
        if dtype is not None:
            check_dtype("dtype", dtype)
        if self.grows():
            raise ValueError(f"{type(self).__name__} has no state_spec, as its memory grows with the sequence")
        bare: dict[int, Any] = {id(x): nn.Parameter(x.detach().to("meta")) for x in self.parameters()}
        bare |= {id(x): x.to("meta") for x in self.buffers()}
        bare |= {id(hook): hook for hook in placement_hooks(self)}  # they hold weights
        layer, cache = copy.deepcopy(self, bare).to(dtype=dtype), LayerCache()
        remove_placement(layer)
        layer.cp_group = None
        layer.take_part(HeadPart())  # nothing is gathered
        with torch.no_grad():
            layer(token_of(layer), cache)
        return cache

    def initial_state(self, count: int) -> LayerCache:
        """The cache of `count` sequences before their first tokens. An empty cache has the same meaning; this one can be
        concatenated with the caches of other sequences.

        Raises:
            ValueError: count is not positive, or the layer has no attribute `hidden_size`.
        """
        check_size("count", count)
        cache, x_11D = LayerCache(), token_of(self)
        with torch.no_grad():
            self(x_11D, cache, torch.tensor([0, 0, 1], device=x_11D.device))  # the first of two sequences is empty
        cache.apply(lambda x: x[:1].repeat(count, *[1] * (x.ndim - 1)))
        return cache

    def sections(self) -> Mapping[str, Sequence[int]]:
        """Parameters that join several, such as the projections of q, k and v in one matrix: the sizes of these along the first
        dimension, by the name of the parameter or of its module. Processes that divide the heads divide each of them."""
        return {}

    def take_part(self, part: HeadPart) -> None:
        """Make this layer one of several parts of a layer with more heads: what depends on the number of a head, or on all heads,
        then does so as in the whole layer. Modules that need to know have an attribute `part`, a `HeadPart`."""
        for module in self.modules():
            if isinstance(getattr(module, "part", None), HeadPart):
                module.part = part  # type: ignore[assignment]  # torch declares attributes as modules

    def probe(self, **internals: Tensor | Callable[[], Tensor | None] | None) -> None:
        """Pass intermediate results by name to an open `fastweights.layers.probe`; without one this does nothing.

        A function is called only if its name is recorded. None means that this layer has no such result.
        """
        if self._listener is not None:
            self._listener(internals)

    def probe_names(self) -> list[str]:
        """The names of `probes` that this layer has with its options."""
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


def token_of(layer: Mixer) -> Tensor:
    """An input [1, 1, D] of zeros, in the dtype of the layer: the narrowest of 16 bits or more. Quantised weights have fewer, and
    their scales are float32."""
    numbers = (x for x in layer.parameters() if x.is_floating_point() and x.itemsize > 1)
    width, first = getattr(layer, "hidden_size", None), min(numbers, key=lambda x: x.itemsize, default=torch.zeros(()))
    if width is None:
        raise ValueError(f"{type(layer).__name__} must have the attribute hidden_size, the width of its input; set it")
    return first.new_zeros(1, 1, check_size("hidden_size", width), device=execution_device(layer))


def check_input(layer: ConfiguredMixer, x_BTD: object, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
    """Check the arguments of a mixer's forward."""
    wanted = f"x must be a tensor [batch, time >= 1, {layer.hidden_size}]"
    if not isinstance(x_BTD, Tensor):
        raise TypeError(f"{wanted}, got {type(x_BTD).__name__}; convert it with torch.as_tensor")
    check_dense("x", x_BTD)
    if x_BTD.ndim != 3 or x_BTD.shape[2] != layer.hidden_size or x_BTD.shape[1] < 1:
        raise ValueError(f"{wanted}, got {shape_of(x_BTD)}")
    if not torch.compiler.is_compiling():  # a graph is traced with fake tensors, which torch checks
        check_like_parameters("x", x_BTD, layer)
    ranks = 1 if layer.cp_group is None else layer.cp_group.size
    sequences = check_cu_seqlens(cu_seqlens, len(x_BTD), ranks * x_BTD.shape[1], like=x_BTD)
    count = sequences.count
    if cache is None:
        return
    if layer.cp_group is not None:
        raise ValueError(
            "cache must be None with context parallelism, where no rank has whole sequences; call "
            "fastweights.distributed.whole_sequences(model) before decoding"
        )
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache must be a fastweights.layers.LayerCache or None, got {type(cache).__name__}")
    if cache.count not in (None, count):
        raise ValueError(
            f"cache must hold as many sequences as the input, {count}, got {cache.count}; "
            "start an empty cache for other sequences"
        )
    if cache.rows is not None:
        check_columns("cache.rows", cache.rows, sequences)


def check_like_parameters(name: str, x: Tensor, module: nn.Module) -> None:
    """That x is of the device and a dtype of the module's parameters. Under autocast torch casts it, quantized parameters say
    nothing of what they are multiplied with, and accelerate's hooks move x and offloaded parameters where they belong."""
    first = next(module.parameters(), None)
    if first is None or (x.dtype == first.dtype and x.device == first.device):
        return
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{name} must be a floating-point tensor, got {x.dtype}; convert it with {name}.to({first.dtype})"
        )
    if first.device.type != "meta" and x.device != first.device and not is_placed(module):
        raise ValueError(
            f"{name} must be on the device of the parameters, {first.device}, got {x.device}; move it or the module there"
        )
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if x.dtype in dtypes or not dtypes <= set(FLOATS) or torch.is_autocast_enabled(x.device.type):
        return
    raise ValueError(
        f"{name} must be of the dtype of the parameters, {first.dtype}, got {x.dtype}; convert it with "
        f"{name}.to({first.dtype}), or call it under torch.autocast"
    )


def _with_checked_length(state_size: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    @functools.wraps(state_size)
    def checked(self: Any, length: int = 1) -> int:
        return state_size(self, check_whole_number("length", length))

    return checked
